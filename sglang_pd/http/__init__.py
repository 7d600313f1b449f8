"""What the HTTP servers of workers and routers share: bounds on bodies, bounds on connections, common terms."""
