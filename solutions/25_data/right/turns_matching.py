# 25.3: each place finds a turn, and may send another one on
def turns(weights):
    total, found = sum(weights), {}
    begins = [(j * total // weight, -(-(j + 1) * total // weight), i)
              for i, weight in enumerate(weights) for j in range(weight)]

    def settle(turn, seen):
        for place in range(*begins[turn][:2]):
            if place not in seen:
                seen.add(place)
                if place not in found or settle(found[place], seen):
                    found[place] = turn
                    return True
        return False

    for turn in range(total):
        settle(turn, set())
    return [begins[found[place]][2] for place in range(total)]
