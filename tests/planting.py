"""Put a NaN or Inf into a network at one place: the inputs, activations, losses, gradients or weights of a block."""


def bad_input(unit, value):
    learn = unit.learn

    def poisoned(x, *rest, **named):
        x = x.clone()
        x[0, 0, 0, 0] = value
        return learn(x, *rest, **named)

    unit.learn = poisoned
    return lambda: delattr(unit, "learn")


def bad_activation(block, value):
    def poison(module, inputs, output):
        output = output.clone()
        output[0, 0, 0, 0] = value
        return output

    return block.conv.register_forward_hook(poison).remove


def bad_loss(unit, value):
    learn = unit.learn

    def poisoned(*args, **named):
        credit = learn(*args, **named)
        credit.losses[0] = value
        return credit

    unit.learn = poisoned
    return lambda: delattr(unit, "learn")


def bad_gradient(block, value):
    def poison(gradient):
        gradient = gradient.clone()
        gradient[(0,) * gradient.dim()] = value
        return gradient

    return block.conv.weight.register_hook(poison).remove


def bad_weight(block, value):
    weight = block.conv.weight.data
    kept = weight.view(-1)[0].item()
    weight.view(-1)[0] = value
    return lambda: weight.view(-1).__setitem__(0, kept)


def plant(net, site, block, value):
    """Plant ``value`` at ``site`` of a block; returns (unit, undo)."""
    where, unit = next((i, u) for i, u in enumerate(net.units) for b in u.blocks if b.index == block)
    part = next(b for b in unit.blocks if b.index == block)
    if site == "pixel":
        return where, bad_input(unit, value)
    if site == "activation":
        return where, bad_activation(part, value)
    if site == "loss":
        return where, bad_loss(unit, value)
    return where, {"gradient": bad_gradient, "weight": bad_weight}[site](part, value)
