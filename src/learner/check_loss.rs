//! `coevolve check loss`
