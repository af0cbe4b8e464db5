"""Operations, cancellation, deadlines, threads and claims: what runs at the same time, and how it ends."""
