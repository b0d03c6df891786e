"""`python -m server` is `samebits`."""

from server.cli import program

if __name__ == "__main__":
    program()
