//! RunPodSandbox: record, shim, network. A failure undoes all steps.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use coracle_proto::{cri, shim};
use cri::ContainerEventType::{ContainerCreatedEvent, ContainerStartedEvent};
use tracing::info;

use super::SandboxService;
use super::check::check;
use crate::cgroup::is_below_root;
use crate::clock::now;
use crate::error::Error;
use crate::names::Claim;
use crate::namespaces;
use crate::records::{SandboxPhase, SandboxRecord};
use crate::sandbox::user_namespace::{Lists, Mapping, Owner};
use crate::sandbox::{self, LiveShim, attachment, files};
use crate::selinux::Labels;
use crate::shim_client::Shim;
use crate::steps::Steps;
use crate::undo::{Step, Undo};

/// Maximum size of the node's /etc/hosts and /etc/resolv.conf in bytes. A larger file counts as empty.
const NODE_FILE_MAX: u64 = 4 << 20;

impl SandboxService {
    /// Validates the request and claims the sandbox's name. Refuses a name that another sandbox has. Waits for a sandbox
    /// of this name that is being created or undone.
    pub(crate) async fn sandbox_claim(&self, request: &cri::RunPodSandboxRequest) -> Result<Claim, Error> {
        let config = request.config.as_ref().ok_or_else(Error::no_config)?;
        check(config, &request.runtime_handler, &self.machine.host)?;
        self.check_cgroup(config)?;
        self.check_network(config).await?;
        let metadata = config.metadata.clone().unwrap_or_default();
        self.objects.names.claim(sandbox::name(&metadata), crate::services::new_id()).await
    }

    /// Runs a sandbox whose name is claimed for this id.
    pub(crate) async fn sandbox_run(
        &self,
        request: cri::RunPodSandboxRequest,
        id: String,
    ) -> Result<cri::RunPodSandboxResponse, Error> {
        self.run_or_undo(request, id.clone(), false).await?;
        Ok(cri::RunPodSandboxResponse { pod_sandbox_id: id })
    }

    /// Runs a sandbox, or undoes all steps. If the record of a sandbox has the flag `restoring`, the next start of the
    /// runtime removes the sandbox, even if the sandbox is ready.
    pub(crate) async fn run_or_undo(
        &self,
        request: cri::RunPodSandboxRequest,
        id: String,
        restoring: bool,
    ) -> Result<(), Error> {
        let config = request.config.ok_or_else(Error::no_config)?;
        let record = SandboxRecord::new(&id, config, request.runtime_handler, now());
        let record = SandboxRecord { restoring, ..record };
        let mut undo = Undo::new(&self.undo);
        let started = self.run(record, &mut undo).await;
        undo.finish(started).await
    }

    async fn run(&self, mut record: SandboxRecord, undo: &mut Undo) -> Result<(), Error> {
        let mut steps = Steps::begin();
        let id = record.id.clone();
        let metadata = record.config.metadata.clone().unwrap_or_default();
        let first_process = self.first_process(&record.config).await?;
        undo.push(Step::Level(id.clone()));
        record.selinux = self.machine.selinux.label_pod(&id, &record.config)?;
        undo.push(Step::SandboxRecord(id.clone()));
        self.objects.records.write_sandbox(&record)?;
        coracle_fault::point("run.recorded");
        self.write_pod_files(&record)?;
        steps.done("record");
        let dir = self.objects.records.sandbox_dir(&id);
        undo.push(Step::ShimCgroup(self.machine.layout.shim_of_pod(&id)));
        let config = shim::SandboxConfig { init: first_process, ..self.shim_config(&record) };
        let (shim, state) = Shim::spawn(self.shim_program.path(), &dir, config, self.config.shim_timeouts)
            .await
            .map_err(Error::shim("start the pod's shim"))?;
        undo.push(Step::Shim(shim.clone()));
        steps.done("shim");
        coracle_fault::point("run.shim");
        if namespaces::own_network(&record.config) {
            undo.push(Step::Network(id.clone()));
            // The shim is a child of this process: its pid is not reused before the process is waited for.
            let kept = shim.keep_pid().await;
            let _pid_guard = kept.map_err(Error::shim("connect the pod's shim to the network"))?;
            record.addresses = self.connect_pod(&record, shim.pid()).await?;
            steps.done("network");
            coracle_fault::point("run.network");
        }
        self.write_hosts(&record)?;
        let live = LiveShim { shim, init_pid: state.init_pid };
        let _guard = self.transitions.hooks.block_joins().await;
        self.transitions.hooks.run_pod_sandbox(&record, &live, undo).await?;
        record.phase = SandboxPhase::Ready;
        let mut pending = self.transitions.outbox.pending();
        let ready = [ContainerCreatedEvent, ContainerStartedEvent];
        record.transitions = ready.into_iter().filter_map(|what| pending.add(what, now())).collect();
        self.objects.records.write_sandbox(&record)?;
        record.restoring = false;
        coracle_fault::point("run.ready");
        info!(sandbox = id, pod = metadata.name, namespace = metadata.namespace, "sandbox runs");
        pending.send_for_sandbox(&self.monitor.adopt_sandbox(record, live));
        steps.done("ready");
        steps.finish("RunPodSandbox", &id);
        Ok(())
    }

    /// Refuses a cgroup parent that leaves the hierarchy or does not fit the cgroup driver.
    fn check_cgroup(&self, config: &cri::PodSandboxConfig) -> Result<(), Error> {
        let parent = config.linux.as_ref().map_or("", |linux| &linux.cgroup_parent);
        let field = "linux.cgroup_parent";
        if !is_below_root(&format!("{parent}/container")) {
            return Err(Error::invalid(field, format!("{parent:?} leaves the hierarchy")));
        }
        self.machine.layout.check_parent(parent).map_err(|why| Error::invalid(field, why))
    }

    /// Refuses network options that the network cannot fulfil.
    async fn check_network(&self, config: &cri::PodSandboxConfig) -> Result<(), Error> {
        if !namespaces::own_network(config) {
            return attachment::refuse_requested(&config.annotations);
        }
        let attachment = attachment::of("", PathBuf::new(), config)?;
        let checked = self.network.check_requested(&attachment).await;
        let namespace = config.metadata.as_ref().map_or("", |metadata| &metadata.namespace);
        checked.map_err(|source| self.network_error(namespace, source))
    }

    /// Converts the network's refusal to an error of the request. The error names pods instead of sandbox ids. It does
    /// not name pods of other namespaces, because the users of `namespace` can read the error in an event.
    fn network_error(&self, namespace: &str, source: coracle_cni::Error) -> Error {
        use coracle_cni::Error as Network;
        let pod_of = |id: &str| {
            let pod =
                self.objects.tables.sandboxes.get(id).and_then(|sandbox| sandbox.config().metadata.clone());
            match pod {
                Some(pod) if pod.namespace == namespace => format!("the pod {}/{}", pod.namespace, pod.name),
                Some(_) => "a pod of another namespace".to_owned(),
                None => id.to_owned(),
            }
        };
        let why = match &source {
            Network::AddressTaken { address, owner } => {
                format!("address {address} is used by {}", pod_of(owner))
            }
            Network::MacTaken { mac, owner } => {
                format!("hardware address {mac} is used by {}", pod_of(owner))
            }
            Network::Undeclared { .. } => source.to_string(),
            Network::InvalidField { field, .. } if field == "ips" => source.to_string(),
            _ => return Error::Network { id: String::new(), source },
        };
        Error::invalid("annotations", why)
    }

    fn shim_config(&self, record: &SandboxRecord) -> shim::SandboxConfig {
        let config = &record.config;
        let own_network = namespaces::own_network(config);
        let labels = record.selinux.as_ref();
        // The mapping was validated by `check`.
        let mapping = Mapping::of(Some(&namespaces::options(config))).ok().flatten();
        let Lists { uids, gids } = mapping.map(|mapping| mapping.to_shim()).unwrap_or_default();
        shim::SandboxConfig {
            uid_mappings: uids,
            gid_mappings: gids,
            sandbox_id: record.id.clone(),
            hostname: if own_network { config.hostname.clone() } else { String::new() },
            own_network,
            own_ipc: namespaces::own_ipc(config),
            own_uts: own_network,
            share_pid: namespaces::share_pid(config),
            sysctls: config.linux.as_ref().map(|linux| linux.sysctls.clone()).unwrap_or_default(),
            shim_cgroup: self.machine.layout.shim(&record.id),
            shm_dir: self.objects.records.sandbox_dir(&record.id).join("shm").to_string_lossy().into_owned(),
            oom_score_adj: self.machine.host.oom_score(-998),
            mount_label: labels.map(Labels::mount_text).unwrap_or_default(),
            process_label: labels.map(Labels::process_text).unwrap_or_default(),
            hierarchies: self.machine.cgroups.to_shim(),
            open_files: coracle_open_files::limit_of_children().unwrap_or_default(),
            ..Default::default()
        }
    }

    /// Connects the pod to the network and returns its addresses.
    async fn connect_pod(&self, record: &SandboxRecord, shim_pid: i32) -> Result<Vec<String>, Error> {
        let netns = format!("/proc/{shim_pid}/ns/net");
        let attachment = attachment::of(&record.id, netns.into(), &record.config)?;
        let attached = self.network.add(&attachment).await;
        let attached = attached.map_err(|source| Error::Network { id: record.id.clone(), source })?;
        Ok(attached.addresses.iter().map(|network| network.ip().to_string()).collect())
    }

    /// Writes the pod's files that do not need its addresses.
    fn write_pod_files(&self, record: &SandboxRecord) -> Result<(), Error> {
        let dir = self.objects.records.sandbox_dir(&record.id);
        let dns = record.config.dns_config.as_ref().and_then(files::resolv_conf);
        let resolver = dns.unwrap_or_else(|| node_file("/etc/resolv.conf"));
        let hostname = format!("{}\n", namespaces::hostname(&record.config, &self.machine.host.hostname));
        for (name, text) in [("resolv.conf", resolver), ("hostname", hostname)] {
            write_pod_file(record, &dir.join(name), &text)?;
        }
        Ok(())
    }

    fn write_hosts(&self, record: &SandboxRecord) -> Result<(), Error> {
        let text = if namespaces::own_network(&record.config) {
            files::hosts(
                &namespaces::hostname(&record.config, &self.machine.host.hostname),
                &record.addresses,
            )
        } else {
            node_file("/etc/hosts")
        };
        write_pod_file(record, &self.objects.records.sandbox_dir(&record.id).join("hosts"), &text)
    }
}

/// Contents of a file of the node for its pods; empty if it cannot be read. A pod can write to it through a volume, so
/// the size is limited.
fn node_file(path: &str) -> String {
    let bytes = coracle_tree::read(Path::new(path), NODE_FILE_MAX).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Writes a file for all containers of a pod, readable for all users with any umask of this process. The file belongs to
/// root of the pod's user namespace: before Linux 6.3 a tmpfs, the usual run directory, has no idmapped mounts.
fn write_pod_file(record: &SandboxRecord, path: &Path, text: &str) -> Result<(), Error> {
    std::fs::write(path, text).map_err(Error::file("write", path))?;
    std::fs::set_permissions(path, Permissions::from_mode(0o644))
        .map_err(Error::file("set the mode of", path))?;
    match Mapping::of(Some(&namespaces::options(&record.config))).ok().flatten() {
        None => Ok(()),
        Some(mapping) => {
            let Owner { uid, gid } = mapping.root();
            std::os::unix::fs::chown(path, Some(uid), Some(gid))
                .map_err(Error::file("set the owner of", path))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_the_node_that_is_too_large_or_not_regular_is_not_copied_into_a_pod() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("hosts");
        let text = || node_file(&path.to_string_lossy());
        std::fs::write(&path, "127.0.0.1 localhost\n").expect("write");
        assert_eq!(text(), "127.0.0.1 localhost\n");
        std::fs::write(&path, "x".repeat((4 << 20) + 1)).expect("write");
        assert_eq!(text(), "");
        std::fs::remove_file(&path).expect("remove");
        // A read of a FIFO would wait for a writer.
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
        assert_eq!(text(), "");
    }
}
