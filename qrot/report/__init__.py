"""report.html: what a run or a comparison came to, in one file that needs nothing else."""
