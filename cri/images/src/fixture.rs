//! Test fixtures: tar archives, images, a real registry, and a proxy to it that injects failures.

mod proxy;
mod registry;
mod tar;
mod tls;

pub(crate) use proxy::{ProxyFault, TestProxy};
pub(crate) use registry::{PASSWORD, TestRegistry, USER};
pub(crate) use tar::{TestTar, attributes, gzip, zstd, zstd_with_large_window};
pub(crate) use tls::TlsProxy;

use crate::digest::Digest;

/// An image that can be pushed.
pub(crate) struct TestImage {
    pub(crate) config: Vec<u8>,
    pub(crate) manifest: Vec<u8>,
    pub(crate) layers: Vec<Vec<u8>>,
}

impl TestImage {
    /// An image of layers, compressed or not, with the diff ids of their content.
    pub(crate) fn new(layers: Vec<(Vec<u8>, Digest)>) -> TestImage {
        TestImage::with(layers, &serde_json::json!({"Env": ["A=b"], "Cmd": ["/bin/true"], "Volumes": null}))
    }

    /// Like [`TestImage::new`], with the `config` object of the configuration.
    pub(crate) fn with(layers: Vec<(Vec<u8>, Digest)>, process: &serde_json::Value) -> TestImage {
        let diff_ids: Vec<String> = layers.iter().map(|(_, diff_id)| diff_id.to_string()).collect();
        let config = serde_json::json!({
            "architecture": crate::config::Platform::host().architecture,
            "os": "linux",
            "config": process,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let config = serde_json::to_vec(&config).unwrap();
        let layers: Vec<Vec<u8>> = layers.into_iter().map(|(blob, _)| blob).collect();
        let manifest = serde_json::json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": descriptor("application/vnd.docker.container.image.v1+json", &config),
            "layers": layers.iter()
                .map(|l| descriptor("application/vnd.docker.image.rootfs.diff.tar.gzip", l)).collect::<Vec<_>>(),
        });
        TestImage { config, manifest: serde_json::to_vec(&manifest).unwrap(), layers }
    }

    /// An image with one gzip layer that contains one file.
    pub(crate) fn small(content: &str) -> TestImage {
        TestImage::new(vec![layer(TestTar::new().file("hello", content.as_bytes()))])
    }

    pub(crate) fn id(&self) -> String {
        Digest::of(&self.config).to_string()
    }
}

/// A gzip layer and its diff id.
pub(crate) fn layer(tar: TestTar) -> (Vec<u8>, Digest) {
    let tar = tar.finish();
    (gzip(&tar), Digest::of(&tar))
}

/// A descriptor of content.
pub(crate) fn descriptor(media_type: &str, content: &[u8]) -> serde_json::Value {
    serde_json::json!({"mediaType": media_type, "digest": Digest::of(content), "size": content.len()})
}

/// Pseudorandom bytes, which do not compress. Always the same.
pub(crate) fn random_bytes(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut step = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(&mut step).flatten().take(length).collect()
}
