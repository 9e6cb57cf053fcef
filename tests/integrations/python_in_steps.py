"""What a user's step does with plain Python, as the conformance suite asks for it."""


def weighed(loss, python):
    """Weigh a loss by what a callback has set, and count the step."""
    if python.counting:
        python.steps += 1
    return loss * python.weight
