# 12.3: look at every place where a stage may begin
def cut_layers(costs, stages):
    def halves(layers, parts):
        if parts == 1:
            return [layers]
        left = parts // 2
        share = sum(costs[i] for i in layers) * left / parts
        at = min(range(left, len(layers) - parts + left + 1),
                 key=lambda at: abs(sum(costs[i] for i in layers[:at]) - share))
        return halves(layers[:at], left) + halves(layers[at:], parts - left)
    return halves(list(range(len(costs))), stages)
