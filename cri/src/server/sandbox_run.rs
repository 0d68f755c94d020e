//! RunPodSandbox: record, shim, network, in this order, all of it or nothing.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_proto::{cri, shim};
use cri::ContainerEventType::{ContainerCreatedEvent, ContainerStartedEvent};
use tracing::info;

use crate::cgroup::is_below_root;
use crate::error::Error;
use crate::host::Host;
use crate::names::Claim;
use crate::records::{SandboxPhase, SandboxRecord};
use crate::runtime::Runtime;
use crate::sandbox::sysctls::Own;
use crate::sandbox::user_namespace::Mapping;
use crate::sandbox::{
    self, Live, Sandbox, SandboxState, attachment, fields, files, namespaces, process1, sysctls,
};
use crate::selinux::Labels;
use crate::shim_client::Shim;
use crate::steps::Steps;
use crate::undo::{Step, Undo};

/// Bytes of the node's own /etc/hosts and /etc/resolv.conf; a larger file is taken for empty.
const NODE_FILE_MAX: u64 = 4 << 20;

impl Runtime {
    /// Takes the name for a new sandbox. Refuses one that another sandbox has, and waits for one that is being made or
    /// undone.
    pub(crate) async fn sandbox_claim(&self, request: &cri::RunPodSandboxRequest) -> Result<Claim, Error> {
        let config = request.config.as_ref().ok_or_else(no_config)?;
        check(config, &request.runtime_handler, &self.inner.host)?;
        self.check_cgroup(config)?;
        self.check_network(config).await?;
        let metadata = config.metadata.clone().unwrap_or_default();
        self.inner.names.claim(sandbox::name(&metadata), new_id()).await
    }

    /// Makes a pod's sandbox, which has its name, and returns its id.
    pub(crate) async fn sandbox_run(
        &self,
        request: cri::RunPodSandboxRequest,
        id: String,
    ) -> Result<cri::RunPodSandboxResponse, Error> {
        self.new_sandbox(request, id.clone(), false).await?;
        Ok(cri::RunPodSandboxResponse { pod_sandbox_id: id })
    }

    /// The same, and one that is `restoring` is undone by a restart also when it is ready: whoever restores it says by
    /// its record when it is complete.
    pub(super) async fn new_sandbox(
        &self,
        request: cri::RunPodSandboxRequest,
        id: String,
        restoring: bool,
    ) -> Result<(), Error> {
        let config = request.config.ok_or_else(no_config)?;
        let record = SandboxRecord::new(&id, config, request.runtime_handler, now());
        let record = SandboxRecord { restoring, ..record };
        let mut undo = Undo::new(&self.inner);
        match self.make_sandbox(record, &mut undo).await {
            Ok(()) => {
                undo.keep();
                Ok(())
            }
            Err(error) => {
                undo.run().await;
                Err(error)
            }
        }
    }

    async fn make_sandbox(&self, mut record: SandboxRecord, undo: &mut Undo) -> Result<(), Error> {
        let inner = &self.inner;
        let mut steps = Steps::begin();
        let id = record.id.clone();
        let metadata = record.config.metadata.clone().unwrap_or_default();
        let first_process = self.first_process(&record.config).await?;
        undo.push(Step::Level(id.clone()));
        record.selinux = inner.selinux.label_pod(&id, &record.config)?;
        undo.push(Step::SandboxRecord(id.clone()));
        inner.records.write_sandbox(&record)?;
        coracle_fault::point("run.recorded");
        self.write_pod_files(&record)?;
        steps.done("record");
        let dir = inner.records.sandbox_dir(&id);
        let config = shim::SandboxConfig { init: first_process, ..self.shim_config(&record) };
        let (shim, state) = Shim::spawn(inner.shim_program.path(), &dir, config, inner.config.shim_times)
            .await
            .map_err(Error::shim("start the pod's shim"))?;
        undo.push(Step::Shim(shim.clone()));
        steps.done("shim");
        coracle_fault::point("run.shim");
        if namespaces::own_network(&record.config) {
            undo.push(Step::Network(id.clone()));
            // The shim is a child of this process: until it is waited for, its number is its own.
            let _zombie_at_most = shim.keep_pid().await;
            record.addresses = self.connect_pod(&record, shim.pid()).await?;
            steps.done("network");
            coracle_fault::point("run.network");
        }
        self.write_hosts(&record)?;
        let live = Live { shim, init_pid: state.init_pid };
        let _pass = inner.nri.pass().await;
        self.tell_pod_runs(&record, &live, undo).await?;
        record.phase = SandboxPhase::Ready;
        let mut telling = self.telling();
        let ready = [ContainerCreatedEvent, ContainerStartedEvent];
        record.transitions = ready.into_iter().filter_map(|what| telling.next(what, now())).collect();
        inner.records.write_sandbox(&record)?;
        record.restoring = false;
        coracle_fault::point("run.ready");
        info!(sandbox = id, pod = metadata.name, namespace = metadata.namespace, "sandbox runs");
        telling.tell_sandbox(&self.adopt_sandbox(record, live));
        steps.done("ready");
        steps.tell("RunPodSandbox", &id);
        Ok(())
    }

    /// Puts a sandbox whose shim lives into the table and listens to the shim.
    pub(crate) fn adopt_sandbox(&self, record: SandboxRecord, live: Live) -> Arc<Sandbox> {
        let (shim, watched) = (live.shim.clone(), live.clone());
        let sandbox = Arc::new(Sandbox::new(record, SandboxState::Ready(live)));
        process1::watch(&sandbox, &watched);
        self.inner.sandboxes.insert(&sandbox.id, Arc::clone(&sandbox));
        self.listen(Arc::clone(&sandbox), shim);
        sandbox
    }

    /// Refuses a parent that leaves the hierarchy, or is not what the driver makes.
    fn check_cgroup(&self, config: &cri::PodSandboxConfig) -> Result<(), Error> {
        let parent = config.linux.as_ref().map_or("", |linux| &linux.cgroup_parent);
        let field = "linux.cgroup_parent";
        if !is_below_root(&format!("{parent}/container")) {
            return Err(Error::invalid(field, format!("{parent:?} leaves the hierarchy")));
        }
        self.inner.layout.check_parent(parent).map_err(|why| Error::invalid(field, why))
    }

    /// Refuses what the pod asks of the network and would not get.
    async fn check_network(&self, config: &cri::PodSandboxConfig) -> Result<(), Error> {
        if !namespaces::own_network(config) {
            return attachment::refuse_asked(&config.annotations);
        }
        let attachment = attachment::of("", PathBuf::new(), config)?;
        self.inner.network.check_asked(&attachment).await.map_err(|source| self.refusal(source))
    }

    /// The network's refusal in the words of who asked for a pod.
    fn refusal(&self, source: coracle_cni::Error) -> Error {
        use coracle_cni::Error as Network;
        let pod_of = |id: &str| {
            let pod = self.inner.sandboxes.get(id).and_then(|sandbox| sandbox.config().metadata.clone());
            pod.map_or_else(|| id.to_owned(), |pod| format!("the pod {}/{}", pod.namespace, pod.name))
        };
        let why = match &source {
            Network::AddressTaken { address, owner } => {
                format!("the address {address} is taken by {}", pod_of(owner))
            }
            Network::MacTaken { mac, owner } => {
                format!("the hardware address {mac} is taken by {}", pod_of(owner))
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
        let (process_label, mount_label) = record.selinux.as_ref().map(Labels::texts).unwrap_or_default();
        // It was checked before anything was made.
        let mapping = Mapping::of(Some(&namespaces::options(config))).ok().flatten();
        let (uid_mappings, gid_mappings) = mapping.map(|mapping| mapping.to_shim()).unwrap_or_default();
        shim::SandboxConfig {
            uid_mappings,
            gid_mappings,
            sandbox_id: record.id.clone(),
            hostname: if own_network { config.hostname.clone() } else { String::new() },
            own_network,
            own_ipc: namespaces::own_ipc(config),
            own_uts: own_network,
            share_pid: namespaces::share_pid(config),
            sysctls: config.linux.as_ref().map(|linux| linux.sysctls.clone()).unwrap_or_default(),
            shim_cgroup: self.inner.layout.shim(&record.id),
            shm_dir: self.inner.records.sandbox_dir(&record.id).join("shm").to_string_lossy().into_owned(),
            oom_score_adj: self.inner.host.oom_score(-998),
            mount_label,
            process_label,
            hierarchies: self.inner.cgroups.to_shim(),
            open_files: coracle_open_files::of_children().unwrap_or_default(),
            ..Default::default()
        }
    }

    /// Connects the pod and returns its addresses.
    async fn connect_pod(&self, record: &SandboxRecord, shim_pid: i32) -> Result<Vec<String>, Error> {
        let netns = format!("/proc/{shim_pid}/ns/net");
        let attachment = attachment::of(&record.id, netns.into(), &record.config)?;
        let attached = self.inner.network.add(&attachment).await;
        let attached = attached.map_err(|source| Error::Network { id: record.id.clone(), source })?;
        Ok(attached.addresses.iter().map(|network| network.ip().to_string()).collect())
    }

    /// Writes what does not wait for the pod's addresses.
    fn write_pod_files(&self, record: &SandboxRecord) -> Result<(), Error> {
        let dir = self.inner.records.sandbox_dir(&record.id);
        let dns = record.config.dns_config.as_ref().and_then(files::resolv_conf);
        let resolver = dns.unwrap_or_else(|| of_node("/etc/resolv.conf"));
        let hostname = format!("{}\n", self.hostname_of(&record.config));
        for (name, text) in [("resolv.conf", resolver), ("hostname", hostname)] {
            write_pod_file(record, &dir.join(name), &text)?;
        }
        Ok(())
    }

    fn write_hosts(&self, record: &SandboxRecord) -> Result<(), Error> {
        let text = if namespaces::own_network(&record.config) {
            files::hosts(&self.hostname_of(&record.config), &record.addresses)
        } else {
            of_node("/etc/hosts")
        };
        write_pod_file(record, &self.inner.records.sandbox_dir(&record.id).join("hosts"), &text)
    }

    /// What the pod's processes see as their host name.
    pub(crate) fn hostname_of(&self, config: &cri::PodSandboxConfig) -> String {
        if namespaces::own_network(config) && !config.hostname.is_empty() {
            config.hostname.clone()
        } else {
            self.inner.host.hostname.clone()
        }
    }
}

/// A file of the node that its pods see; empty when it cannot be read. A pod may have it as a volume.
fn of_node(path: &str) -> String {
    let bytes = coracle_tree::read(Path::new(path), NODE_FILE_MAX).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Writes a file for all containers of a pod, whose users are to read it whatever our umask is. Given to the pod's root, since before Linux 6.3 a tmpfs, which the
/// run directory usually is, knows no idmapped mounts.
fn write_pod_file(record: &SandboxRecord, path: &Path, text: &str) -> Result<(), Error> {
    std::fs::write(path, text).map_err(Error::file("write", path))?;
    std::fs::set_permissions(path, Permissions::from_mode(0o644))
        .map_err(Error::file("open to all", path))?;
    match Mapping::of(Some(&namespaces::options(&record.config))).ok().flatten() {
        None => Ok(()),
        Some(mapping) => {
            let (uid, gid) = mapping.root();
            std::os::unix::fs::chown(path, Some(uid), Some(gid)).map_err(Error::file("give away", path))
        }
    }
}

/// What a request without a configuration is refused for.
pub(super) fn no_config() -> Error {
    Error::invalid("config", "is missing")
}

/// An id that nobody has.
pub(super) fn new_id() -> String {
    hex::encode(rand::random::<[u8; 32]>())
}

/// Unix time in nanoseconds.
pub(crate) fn now() -> i64 {
    i64::try_from(jiff::Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX)
}

/// Refuses what cannot be done before anything is.
pub(super) fn check(config: &cri::PodSandboxConfig, runtime_handler: &str, host: &Host) -> Result<(), Error> {
    let Some(metadata) = &config.metadata else {
        return Err(Error::invalid("config.metadata", "is missing"));
    };
    if metadata.name.is_empty() || metadata.namespace.is_empty() || metadata.uid.is_empty() {
        return Err(Error::invalid("config.metadata", "needs name, namespace and uid"));
    }
    if config.windows.is_some() {
        return Err(Error::invalid("config.windows", "this is Linux"));
    }
    if !runtime_handler.is_empty() {
        return Err(Error::invalid("runtime_handler", format!("there is none named {runtime_handler:?}")));
    }
    fields::check(config)?;
    check_sysctls(config)?;
    let options = namespaces::options(config);
    let mapping = Mapping::check_pod(&options)
        .map_err(|why| Error::invalid("namespace_options.userns_options", why))?;
    if mapping.is_some() && !host.kernel.user_namespaces {
        return Err(Error::Unsupported("a user namespace with idmapped mounts (Linux 5.19), on this node,"));
    }
    Ok(())
}

/// Refuses kernel parameters of the node's.
fn check_sysctls(config: &cri::PodSandboxConfig) -> Result<(), Error> {
    let own = Own { network: namespaces::own_network(config), ipc: namespaces::own_ipc(config) };
    for name in config.linux.iter().flat_map(|linux| linux.sysctls.keys()) {
        sysctls::check(name, own).map_err(|why| Error::invalid("linux.sysctls", why))?;
    }
    Ok(())
}
