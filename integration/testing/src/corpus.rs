//! Inputs of the fuzz targets, which tests replay.

use std::path::{Path, PathBuf};

/// Paths of the inputs of a fuzz target, in `integration/fuzz/corpus`.
///
/// # Panics
/// When there are none.
#[must_use]
pub fn corpus(target: &str) -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let inputs: Vec<_> =
        std::fs::read_dir(dir).into_iter().flatten().flatten().map(|file| file.path()).collect();
    assert!(!inputs.is_empty(), "the corpus of {target} is empty");
    inputs
}

/// Passes each input of a fuzz target to `run`. The output of a failed test ends with the path of the input.
///
/// # Panics
/// When there are no inputs, or one cannot be read.
pub fn replay_corpus(target: &str, run: impl Fn(&[u8])) {
    for input in corpus(target) {
        eprintln!("{}", input.display());
        match std::fs::read(&input) {
            Ok(bytes) => run(&bytes),
            Err(error) => panic!("cannot read {}: {error}", input.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn each_input_is_replayed() {
        let count = Cell::new(0);
        replay_corpus("quantity", |_| count.set(count.get() + 1));
        assert_eq!(count.get(), corpus("quantity").len());
    }

    #[test]
    #[should_panic(expected = "the corpus of absent is empty")]
    fn a_missing_corpus_is_an_error() {
        replay_corpus("absent", |_| {});
    }
}
