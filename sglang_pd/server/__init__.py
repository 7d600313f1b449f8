"""The HTTP face of a worker: SGLang's and OpenAI's request and answer shapes over rooms."""
