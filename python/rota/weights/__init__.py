"""The parts of rota.WeightStore (store.py): weights that trainers publish and readers pull."""
