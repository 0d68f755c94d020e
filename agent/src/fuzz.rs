//! Functions of the fuzz targets in `integration/fuzz`, and a test that replays their corpora with a stable compiler.
//! Each function accepts any bytes and fails by a panic, or by exceeding the fuzzer's limits on time and memory.

/// A client's query for a log, and the lines of the log, which contain a container's output.
pub fn pod_log(data: &[u8]) {
    crate::server::logs::fuzz(data);
}

/// A file with environment variables, which a container wrote.
pub fn env_file(data: &[u8]) {
    crate::pod::fuzz_env_file(data);
}

/// The list of devices of a device plugin.
pub fn devices(data: &[u8]) {
    crate::device_plugins::fuzz_list(data);
}

/// The header `Location` of a container's response to a probe.
pub fn redirect(data: &[u8]) {
    crate::pod::fuzz_redirect(data);
}

/// The overlay annotations of another node.
pub fn annotation(data: &[u8]) {
    crate::overlay::fuzz_annotations(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpora_are_replayed() {
        let targets = [
            ("pod_log", super::pod_log as fn(&[u8])),
            ("env_file", super::env_file),
            ("devices", super::devices),
            ("redirect", super::redirect),
            ("annotation", super::annotation),
        ];
        for (name, target) in targets {
            coracle_testing::replay_corpus(name, target);
        }
    }
}
