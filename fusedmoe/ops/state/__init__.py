"""State of ops that outlives a call: the weight cache, amax histories, random numbers, sums of gradients."""
