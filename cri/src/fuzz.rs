//! Functions of the fuzz targets in `integration/fuzz`, and a test that replays their corpora with a stable compiler.
//! Each function accepts any bytes and fails by a panic.

/// A client's bytes after its upgrade to SPDY/3.1.
pub fn spdy(data: &[u8]) {
    crate::stream::fuzz_spdy(data);
}

/// A client's WebSocket frames of exec and attach, and the sizes of its terminal.
pub fn terminal(data: &[u8]) {
    crate::stream::fuzz_websocket(data);
    crate::stream::fuzz_resize(data);
}

/// The account files of an image.
pub fn passwd(data: &[u8]) {
    crate::user::fuzz(data);
}

/// A CDI file.
pub fn cdi(data: &[u8]) {
    crate::cdi::fuzz(data);
}

/// The messages of a shim.
pub fn link(data: &[u8]) {
    crate::shim_client::fuzz(data);
}

/// A seccomp profile file.
pub fn seccomp(data: &[u8]) {
    crate::container::filter::fuzz(data);
}

/// A gRPC client's bytes on a Unix socket.
pub fn client(data: &[u8]) {
    crate::server::fuzz::client(data);
}

/// A client's request for a container in a pod.
pub fn config(data: &[u8]) {
    crate::server::fuzz::config(data);
}

/// A pod's or a container's record, or the manifest of a checkpoint.
pub fn record(data: &[u8]) {
    crate::records::fuzz(data);
    crate::checkpoint::fuzz(data);
}

/// Files in /proc of a container's process. The container chooses the names of processes, cgroups, interfaces and mount
/// points.
pub fn process(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    crate::exec_killer::fuzz(&text);
    crate::pidfd::fuzz(&text);
    crate::checkpoint::fuzz_mounts(&text);
    crate::usage::fuzz(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpora_are_replayed() {
        let targets = [
            ("spdy", super::spdy as fn(&[u8])),
            ("terminal", super::terminal),
            ("passwd", super::passwd),
            ("cdi", super::cdi),
            ("link", super::link),
            ("seccomp", super::seccomp),
            ("client", super::client),
            ("config", super::config),
            ("record", super::record),
            ("process", super::process),
        ];
        for (name, target) in targets {
            coracle_testing::replay_corpus(name, target);
        }
    }
}
