//! The changes of the cluster that may make a refused pod schedulable. Upstream calls these queueing hints.

use std::ops::BitOr;

/// A set of changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Changes(u8);

impl Changes {
    /// A node was added or changed.
    pub(crate) const NODE: Self = Self(1);
    /// A pod left its node or requests less: resources, host ports or topology domains may have become free.
    pub(crate) const POD_GONE: Self = Self(2);
    /// A pod was placed on a node, or its labels changed: affinity terms may select it.
    pub(crate) const POD_PLACED: Self = Self(4);
    /// The labels of a namespace changed.
    pub(crate) const NAMESPACE: Self = Self(8);
    /// Devices were released, or the devices of nodes or their classes changed.
    pub(crate) const DEVICES: Self = Self(16);
    /// The pod's group changed.
    pub(crate) const GROUP: Self = Self(32);
    /// A node was deleted: pods may be spread over fewer domains.
    pub(crate) const NODE_GONE: Self = Self(64);
    /// The types of changes.
    pub(crate) const TYPES: [Self; 7] = [
        Self::NODE,
        Self::POD_GONE,
        Self::POD_PLACED,
        Self::NAMESPACE,
        Self::DEVICES,
        Self::GROUP,
        Self::NODE_GONE,
    ];
    /// Every change.
    pub(crate) const ALL: Self = Self(127);

    /// The name of the set's first change in metrics. The names are upstream's; one name stands for all changes of a
    /// kind.
    pub(crate) fn event(self) -> &'static str {
        let names = [
            (Self::NODE, "NodeUpdate"),
            (Self::POD_GONE, "AssignedPodDelete"),
            (Self::POD_PLACED, "AssignedPodAdd"),
            (Self::NAMESPACE, "NamespaceUpdate"),
            (Self::DEVICES, "resource.k8s.io/ResourceSliceUpdate"),
            (Self::GROUP, "scheduling.k8s.io/PodGroupUpdate"),
            (Self::NODE_GONE, "NodeDelete"),
        ];
        names.into_iter().find(|(change, _)| change.overlaps(self)).map_or("", |(_, name)| name)
    }

    /// Whether the sets have a change in common.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

impl BitOr for Changes {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}
