"""What a run survives: every fault that one Linux machine can inject, with a figure, a goal and what peers do."""
