"""Events, heartbeat and status: is it alive, how far, how fast, what is wrong."""
