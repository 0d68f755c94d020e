//! SELinux: the labels of pods and containers, where the kernel has a policy that knows containers.
//!
//! The rules are containerd's and CRI-O's. The policy names the labels of a container's processes and files
//! (`lxc_contexts`); what a pod or a container asks for counts more. Each pod gets a level of its own, two
//! categories that no other pod has, so that pods are kept apart though their types are the same. Where SELinux is
//! not enabled, options are checked and have no effect.

mod label;
mod level;
mod policy;
mod relabel;

use std::path::Path;

use coracle_proto::cri;
use cri::{NamespaceMode, NamespaceOption};
use tracing::{info, warn};

pub(crate) use self::label::Labels;
use self::label::{Wish, of_container, of_pod};
use self::level::Levels;
pub use self::policy::labels_containers;
use self::policy::{Policy, is_enabled};
pub(crate) use self::relabel::relabel;
use crate::error::Error;
use crate::sandbox::namespaces::{self, Pids};

const FIELD: &str = "selinux_options";
/// Where layers are, below the runtime's root, and where they are born.
const LAYERS: [&str; 4] = ["images", "containers", "parts", "mount-points"];

/// What is known of SELinux on this machine, and the levels that are taken.
#[derive(Debug)]
pub(crate) struct Selinux {
    /// None where nothing is labelled.
    policy: Option<Policy>,
    levels: Levels,
}

/// Configuration and labels of a container's pod.
pub(crate) struct PodLabels<'a> {
    pub(crate) config: &'a cri::PodSandboxConfig,
    pub(crate) labels: Option<&'a Labels>,
}

// === impl Selinux ===

impl Selinux {
    /// Looks whether the kernel has it, and for what the policy says of containers.
    pub(crate) fn look() -> Self {
        Self { policy: Policy::look(), levels: Levels::default() }
    }

    /// Labels the layers of images and containers below the runtime's root, which takes time once: what is made there
    /// later has the label of the directory that it is made in, and keeps it when it is renamed into another. A program that maps a file of its root is judged by the layer's own label,
    /// whatever the overlay's is. Policies know the stores of other runtimes, and not ours.
    pub(crate) fn label_layers(&self, root: &Path) {
        let Some(policy) = &self.policy else { return };
        let label = policy.defaults.read_only.to_string();
        for dir in LAYERS.map(|name| root.join(name)) {
            if !dir.is_dir() || relabel::has(&dir, &label) {
                continue;
            }
            match relabel(&dir, &label) {
                Ok(()) => info!(dir = %dir.display(), label, "labelled the layers"),
                Err(error) => warn!(dir = %dir.display(), label, %error, "could not label the layers"),
            }
        }
    }

    /// What there is of it, for who asks for the runtime's state.
    pub(crate) fn describe(&self) -> String {
        match &self.policy {
            Some(policy) => policy.describe(),
            None if is_enabled() => "on, but the policy names no labels of containers".to_owned(),
            None => "off".to_owned(),
        }
    }

    /// The labels of a new pod, whose level is taken until [`Selinux::release`].
    ///
    /// # Errors
    /// The options are none, or the policy does not know what they make.
    pub(crate) fn label_pod(
        &self,
        id: &str,
        config: &cri::PodSandboxConfig,
    ) -> Result<Option<Labels>, Error> {
        let options = namespaces::security(config).and_then(|security| security.selinux_options.as_ref());
        let wish = Wish::of(options).map_err(|why| Error::invalid(FIELD, why))?;
        let Some(policy) = &self.policy else { return Ok(None) };
        let level = match &wish.level {
            Some(level) => {
                self.levels.hold(id, level);
                None
            }
            None => self.levels.pick(id),
        };
        let labels = of_pod(&policy.defaults, &wish, level);
        self.check(policy, &wish, labels).map(Some)
    }

    /// The labels of a new container in a pod that has some. A level of its own is taken as a pod's is.
    ///
    /// # Errors
    /// As [`Selinux::label_pod`].
    pub(crate) fn label_container(
        &self,
        id: &str,
        config: &cri::ContainerConfig,
        pod: PodLabels<'_>,
    ) -> Result<Option<Labels>, Error> {
        let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
        let options = security.and_then(|security| security.selinux_options.as_ref());
        let wish = Wish::of(options).map_err(|why| Error::invalid(FIELD, why))?;
        let (Some(policy), Some(pods)) = (&self.policy, pod.labels) else { return Ok(None) };
        if let Some(level) = &wish.level {
            self.levels.hold(id, level);
        }
        let own = security.and_then(|security| security.namespace_options.as_ref());
        let of_pod = namespaces::options(pod.config);
        let modes = [own.map(NamespaceOption::ipc).unwrap_or_default(), of_pod.ipc()];
        let nodes_processes = namespaces::pids(&of_pod, own) == Pids::Nodes;
        let separation = label::Separation {
            privileged: security.is_some_and(|security| security.privileged),
            shares_with_node: nodes_processes || modes.contains(&NamespaceMode::Node),
        };
        let asked = of_container(pods, &wish, label::Separation::default());
        self.check(policy, &wish, asked)?;
        Ok(Some(of_container(pods, &wish, separation)))
    }

    /// The level of a pod or container that was found again, is taken.
    pub(crate) fn hold(&self, id: &str, labels: Option<&Labels>) {
        if let Some(level) = labels.and_then(Labels::level) {
            self.levels.hold(id, level);
        }
    }

    /// The level of a pod or container is free again.
    pub(crate) fn release(&self, id: &str) {
        self.levels.release(id);
    }

    /// Refuses labels that the policy does not know, which would be found when the program is started.
    fn check(&self, policy: &Policy, wish: &Wish, labels: Labels) -> Result<Labels, Error> {
        if *wish != Wish::default() {
            for label in [&labels.process, &labels.mount].into_iter().flatten() {
                policy.check(label).map_err(|error| {
                    Error::invalid(FIELD, format!("the policy refuses the label {label}: {error}"))
                })?;
            }
        }
        Ok(labels)
    }
}
