"""Workers: the control that knows rooms, the agents that own memory, and the endpoints engine authors use."""
