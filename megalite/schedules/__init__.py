"""The programs of pipelined steps, which the engine runs and the planner draws. No torch."""
