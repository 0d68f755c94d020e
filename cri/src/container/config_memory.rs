//! The memory of large configurations of containers: environments, commands, arguments, mounts and supplemental groups.
//!
//! References to config maps, or an image, can make the environment of a container megabytes long. The runtime keeps
//! the configuration in memory. Its files in the run directory, which often is in memory too, contain the configuration
//! three times. Nearly all configurations are small and do not count. Larger configurations share a limit. The
//! configurations of one namespace leave a quarter of the limit to other namespaces.

use std::collections::BTreeMap;
use std::sync::Mutex;

use coracle_images::Image;
use coracle_proto::cri;

use crate::lock::locked;

/// Maximum bytes of a small configuration, which does not count.
const SMALL: usize = 128 << 10;
/// Bytes that count for a supplemental group: it is in several lists, in memory and in files.
const PER_GROUP: usize = 32;
/// Maximum bytes of all configurations that count.
const TOTAL: usize = 128 << 20;
/// Maximum bytes of one namespace, as a multiple of the free bytes.
const PER_FREE: usize = 3;
/// The label with which a kubelet names the namespace of a container.
const NAMESPACE: &str = "io.kubernetes.pod.namespace";

/// Bytes that are used, by namespace.
static USED: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());

/// The share of one container in the limit. Dropping it releases the share.
#[derive(Debug)]
pub(crate) struct ConfigMemory {
    namespace: String,
    bytes: usize,
}

// === impl ConfigMemory ===

impl ConfigMemory {
    /// The share of a new container, whose image adds `of_image` bytes. `None` if the configurations would exceed the
    /// limit.
    pub(crate) fn take(config: &cri::ContainerConfig, of_image: usize) -> Option<Self> {
        let (namespace, bytes) = (namespace(config), counted(config, of_image));
        if bytes > 0 {
            // One lock for check and registration, so that concurrent creates cannot exceed the limit together.
            let mut used = locked(&USED);
            let own = used.get(&namespace).copied().unwrap_or_default() + bytes;
            let free = TOTAL.checked_sub(used.values().sum::<usize>() + bytes)?;
            if own > PER_FREE * free {
                return None;
            }
            used.insert(namespace.clone(), own);
        }
        Some(Self { namespace, bytes })
    }

    /// Like [`take`](Self::take) for a container that exists, even if it exceeds the limit.
    pub(crate) fn of(config: &cri::ContainerConfig, of_image: usize) -> Self {
        let (namespace, bytes) = (namespace(config), counted(config, of_image));
        if bytes > 0 {
            *locked(&USED).entry(namespace.clone()).or_default() += bytes;
        }
        Self { namespace, bytes }
    }
}

impl Drop for ConfigMemory {
    fn drop(&mut self) {
        let mut used = locked(&USED);
        if let Some(own) = used.get_mut(&self.namespace) {
            *own = own.saturating_sub(self.bytes);
            if *own == 0 {
                used.remove(&self.namespace);
            }
        }
    }
}

fn namespace(config: &cri::ContainerConfig) -> String {
    config.labels.get(NAMESPACE).cloned().unwrap_or_default()
}

/// Bytes that an image adds to the configurations of its containers: its environment, entrypoint and command.
pub(crate) fn bytes_of_image(image: &Image) -> usize {
    let words = image.env().iter().chain(image.entrypoint()).chain(image.cmd());
    words.map(String::len).sum()
}

/// The bytes of a configuration that count.
fn counted(config: &cri::ContainerConfig, of_image: usize) -> usize {
    let words = config.command.iter().chain(&config.args).map(String::len);
    let variables = config.envs.iter().map(|variable| variable.key.len() + variable.value.len());
    let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    let groups = security.map_or(0, |security| PER_GROUP * security.supplemental_groups.len());
    let paths = |mount: &cri::Mount| mount.container_path.len() + mount.host_path.len();
    let mounts = config.mounts.iter().map(|mount| size_of::<cri::Mount>() + paths(mount));
    let bytes: usize = words.chain(variables).chain(mounts).chain([of_image, groups]).sum();
    if bytes > SMALL { bytes } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(namespace: &str, bytes: usize) -> cri::ContainerConfig {
        cri::ContainerConfig {
            envs: vec![cri::KeyValue { value: vec![b'x'; bytes], ..Default::default() }],
            labels: [(NAMESPACE.to_owned(), namespace.to_owned())].into(),
            ..Default::default()
        }
    }

    #[test]
    fn many_supplemental_groups_count() {
        let of = |groups: usize| {
            let mut config = config("groups", 0);
            let security = config.linux.get_or_insert_default().security_context.get_or_insert_default();
            security.supplemental_groups = vec![7; groups];
            counted(&config, 0)
        };
        assert_eq!((of(SMALL / PER_GROUP), of(60_000)), (0, 60_000 * PER_GROUP));
    }

    #[test]
    fn many_mounts_count() {
        let of = |count: usize| {
            let paths = ("/a".to_owned(), "/b".to_owned());
            let mount = cri::Mount { container_path: paths.0, host_path: paths.1, ..Default::default() };
            counted(&cri::ContainerConfig { mounts: vec![mount; count], ..Default::default() }, 0)
        };
        assert_eq!((of(100), of(15_000)), (0, 15_000 * (size_of::<cri::Mount>() + 4)));
    }

    #[test]
    fn large_configurations_of_containers_share_a_limit() {
        let large = |namespace| {
            let config = config(namespace, 8 << 20);
            std::iter::from_fn(|| ConfigMemory::take(&config, 0)).collect::<Vec<_>>()
        };
        let (many, few) = (large("memory-a"), large("memory-b"));
        assert_eq!((many.len(), few.len()), (12, 3));
        let small = ConfigMemory::take(&config("memory-a", SMALL), 0);
        assert!(small.is_some_and(|memory| memory.bytes == 0));
        let recovered = ConfigMemory::of(&config("memory-a", 64 << 20), 0);
        assert!(ConfigMemory::take(&config("memory-c", SMALL + 1), 0).is_none());
        assert!(ConfigMemory::take(&config("memory-c", SMALL), 1).is_none(), "the bytes of the image count");
        drop((many, few, recovered));
        assert!(ConfigMemory::take(&config("memory-c", 64 << 20), 0).is_some());
        assert!(!locked(&USED).keys().any(|namespace| namespace.starts_with("memory-")));
    }
}
