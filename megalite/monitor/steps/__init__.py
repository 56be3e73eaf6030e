"""Shows where the time of a step went on each rank. The analysis is pure arithmetic on records, without torch."""
