"""`cflow lab overlap`: what delaying experts is worth when they are read from disk.

bench.py     `measure`: makes the model files and walks over the cells
cell.py      one cell: six arms that decode the same tokens in turn
streams.py   the token streams, and decoding one of them
resident.py  a model with all experts in memory: its choices and the time of its stages
tiers.py     the same file behind expert caches with bounded reads, and what reads cost
records.py   expert records of a file by number
schedule.py  the schedule of a token worked out without running it
widen.py     a trained model with wider FFNs and the same output
figures.py   overlap.json and the two laws
picture.py   overlap.png
"""
