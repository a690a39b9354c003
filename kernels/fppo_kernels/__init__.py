"""Operations on tensors and their implementations, with torch and attrs alone."""
