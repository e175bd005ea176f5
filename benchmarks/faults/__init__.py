"""The fault campaign: crashes, damage, full disks and kills against the checkpoint engine, and its table.

    python -m benchmarks.faults --seed 1            # the long run: minutes
    python -m benchmarks.faults --seed 1 --short    # what the tests run: seconds

Every fault is judged by one rule (``judge.py``): the right bytes of some saved step, never older than the
newest generation that was durable and still verifies; an error only where nothing verifies.
"""
