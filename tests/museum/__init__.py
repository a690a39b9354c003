"""A museum: published failures of RL post-training code, each as a mutation of ours and the law that catches it."""
