"""Checks: each check prints its result. `failures` has the texts of the failed checks."""
import subprocess, time

failures = []


def run(*words, **options):
    return subprocess.run(words, capture_output=True, text=True, **options)


def output(done):
    return done.stdout[-2000:] + done.stderr[-2000:]


def check(text, holds, why=""):
    print(("ok      " if holds else "FAILED  ") + text, flush=True)
    if not holds:
        failures.append(text)
        print("        " + str(why)[-3000:].replace("\n", "\n        "), flush=True)
    return holds


def succeeds(text, done):
    check(text, done.returncode == 0, output(done))
    return done.stdout


def becomes(text, attempt, seconds=120):
    """Checks that `attempt` returns (True, _) within `seconds`. On a failure the second value is printed."""
    end = time.monotonic() + seconds
    while True:
        holds, why = attempt()
        if holds or time.monotonic() > end:
            return check(text, holds, why)
        time.sleep(0.5)
