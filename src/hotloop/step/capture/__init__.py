"""Recording a step: engines, static inputs, optimizers, and what must still hold before a replay."""
