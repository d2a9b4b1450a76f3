"""Real, isolated, stateful sandboxes: `dsec.Client().create(...)`, `run`, `stop`."""
