"""The one exception that means: the input is wrong, and here is how."""


class InputError(Exception):
    """Bad input from the person using qrot.

    The message is one clear sentence. The command line prints it on stderr and exits with code 2;
    anything else that is raised is a fault in qrot and keeps its traceback.
    """
