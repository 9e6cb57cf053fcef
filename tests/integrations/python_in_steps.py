"""The plain Python of a user's step, as the conformance suite asks for it."""


def weighed(loss, python):
    """Weigh a loss by a number that a callback sets, and count the step."""
    if python.counting:
        python.steps += 1
    return loss * python.weight
