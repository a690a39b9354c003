"""Functions that worker processes import by name; so nothing here is slow to import."""


def number(sample):
    return float(sample.prompt)


async def later(sample):
    return float(sample.prompt)


async def blocks(sample):
    if sample.prompt == "3":
        while True:  # no coroutine of its process goes on
            pass
    return float(sample.prompt)
