"""Engine model, emulator, simulator and the benchmarks that compare Headrace with its peers."""
