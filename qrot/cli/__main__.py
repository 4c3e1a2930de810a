"""python -m qrot.cli"""

from qrot.cli import main

main()
