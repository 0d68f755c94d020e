//! What the fuzz targets of `integration/fuzz` call, and the test that replays their corpora with a stable compiler.

/// YAML bodies. A slow input is a failure: the fuzzer limits the time.
pub fn yaml(data: &[u8]) {
    let _refused = crate::body::parse_yaml(data);
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    #[test]
    fn the_corpus_is_replayed() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration/fuzz/corpus/yaml");
        let mut inputs = 0;
        for entry in std::fs::read_dir(corpus).unwrap() {
            super::yaml(&std::fs::read(entry.unwrap().path()).unwrap());
            inputs += 1;
        }
        assert!(inputs > 0, "the corpus is empty");
    }
}
