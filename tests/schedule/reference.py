"""The wave of hanayo-and-pipelines, appendix A, and an execution of orders that shares nothing with ours."""


def snake(P, W):
    return [r if r < P else 2 * P - 1 - r for r in (s % (2 * P) for s in range(2 * P * W))]


def wave_orders(P, W, B):
    place, S = snake(P, W), 2 * P * W
    out = []
    for d in range(P):
        ops = []
        for m in range(B):
            u, i = divmod(m, P)
            for s in (s for s in range(S) if place[s] == d):
                ops.append((u * S + s + 2 * i, 0, "F", s, m))
                ops.append((u * S + (S - 1 - s) + 2 * i + (S - 1), 1, "B", s, m))
        ops.sort()
        out.append([(k, s, m) for _, _, k, s, m in ops])
    return place, out


def runs_to_the_end(rows, depth):
    """Execute text actions of all ranks with messages that may always be sent; False where they hang.

    Blocking receives, local hand-over where a stage's neighbour is on the same rank. Where rows have no communication,
    results are seen by everybody at once.
    """
    has_messages = any("SEND" in kind for row in rows for _, kind, _ in row)
    done, sent = set(), set()
    at = [0] * len(rows)
    while True:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                stage, kind, m = row[at[rank]]
                if not _possible(stage, kind, m, depth, done, sent, has_messages, rank):
                    break
                if kind.startswith("SEND"):
                    sent.add((kind[-1], stage, m))
                else:
                    done.add((rank, kind, stage, m))
                    done.add((None, kind, stage, m))
                at[rank] += 1
                moved = True
        if not moved:
            return all(position == len(row) for position, row in zip(at, rows, strict=True))


def _possible(stage, kind, m, depth, done, sent, has_messages, rank):
    seen = rank if has_messages else None

    def have(*kinds, at):
        return any((seen, k, at, m) in done for k in kinds)

    if kind == "F":
        return stage % depth == 0 or have("F", at=stage - 1) or have("RECV_F", at=stage)
    if kind in ("B", "I"):
        ahead = (stage + 1) % depth == 0 or have("B", "I", at=stage + 1) or have("RECV_B", at=stage)
        return ahead and have("F", at=stage)
    if kind == "W":
        return have("I", at=stage)
    if kind == "SEND_F":
        return have("F", at=stage)
    if kind == "SEND_B":
        return have("B", "I", at=stage)
    if kind == "RECV_F":
        return ("F", stage - 1, m) in sent
    if kind == "RECV_B":
        return ("B", stage + 1, m) in sent
    return True
