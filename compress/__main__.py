"""python -m compress"""

from .cli import main

main()
