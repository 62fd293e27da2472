"""Accelerators of this node: which there are, which are free, and the lease of some of them.

The data model (`model.py`) keeps three things apart that are easily taken for one another:

- a **device** is what a runtime (HIP, CUDA) numbers. `index` is that number where no mask is set;
- a **PCI device** is what holds memory and is leased. Partitions are several devices on one PCI device;
- a **tool index** is the number a command (`amd-smi`, NVML) has for a device. It is for people: nothing here looks a
  device up by it except in the output of that same command.

Devices are told apart by PCI address with domain, and partition. Every value is a `Known`: a value and its source, or
None and where it was looked for. What cannot be read is unknown, never 0, and unknown is never free. Sources that
contradict one another about which device is which are refused: no map is better than a wrong one.

Modules: `amd` (with `kfd` and `smi`) and `nvidia` find devices, `discovery` asks the one of a site; `masks` and `lease`
choose and hold them; `health` judges them before and after a run, `watch` during it; `show` prints them. All of them
only read: no device is ever reset, no process ended, no setting changed. A launcher's way through them:

    node = discover(vendor, options)
    with lease(candidates(node.devices, env), count, options.lock_dir, timeout, config, unfit(look, limits)) as ours:
        before, report = settle(look, indices, options); report.require()
        with watch(look, indices, own, path, options.poll_s) as seen: serve under without_masks(env) | ours.env
        compare(before, look(), ours.devices, options)
"""
