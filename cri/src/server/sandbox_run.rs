//! RunPodSandbox: record, shim, network, in this order, all of it or nothing.

use std::net::IpAddr;

use coracle_cni::{Attachment, PortMapping, Protocol};
use coracle_proto::{cri, shim};
use cri::ContainerEventType::{ContainerCreatedEvent, ContainerStartedEvent};
use tracing::info;

use crate::error::Error;
use crate::lock::locked;
use crate::records::{SandboxPhase, SandboxRecord};
use crate::runtime::Runtime;
use crate::sandbox::{self, Live, Sandbox, SandboxState, files, namespaces};
use crate::shim_client::Shim;
use crate::undo::{Step, Undo};

/// The interface in every pod.
const INTERFACE: &str = "eth0";

impl Runtime {
    /// Makes a pod's sandbox and returns its id. Refuses a name that another sandbox has.
    pub(crate) async fn sandbox_run(
        &self,
        request: cri::RunPodSandboxRequest,
    ) -> Result<cri::RunPodSandboxResponse, Error> {
        let config = request.config.ok_or_else(|| Error::invalid("config", "is missing"))?;
        check(&config, &request.runtime_handler)?;
        let id = new_id();
        let record = SandboxRecord::new(&id, config, request.runtime_handler, now());
        let mut undo = Undo::new(&self.inner);
        match self.make_sandbox(record, &mut undo).await {
            Ok(()) => {
                undo.keep();
                Ok(cri::RunPodSandboxResponse { pod_sandbox_id: id })
            }
            Err(error) => {
                undo.run().await;
                Err(error)
            }
        }
    }

    async fn make_sandbox(&self, mut record: SandboxRecord, undo: &mut Undo) -> Result<(), Error> {
        let inner = &self.inner;
        let id = record.id.clone();
        let metadata = record.config.metadata.clone().unwrap_or_default();
        let name = sandbox::name(&metadata);
        self.reserve(&name, &id)?;
        undo.push(Step::Name(name));
        undo.push(Step::SandboxRecord(id.clone()));
        inner.records.write_sandbox(&record)?;
        self.write_pod_files(&record)?;
        let dir = inner.records.sandbox_dir(&id);
        let shim = Shim::spawn(&inner.config.shim_binary, &dir, self.shim_config(&record))
            .await
            .map_err(Error::shim("start the pod's shim"))?;
        undo.push(Step::Shim(shim.clone()));
        if namespaces::own_network(&record.config) {
            undo.push(Step::Network(id.clone()));
            record.addresses = self.connect_pod(&record, shim.pid()).await?;
        }
        self.write_hosts(&record)?;
        let init_pid = if namespaces::share_pid(&record.config) {
            shim.hello().await.map_err(Error::shim("ask for the pod's init"))?.init_pid
        } else {
            0
        };
        record.phase = SandboxPhase::Ready;
        inner.records.write_sandbox(&record)?;
        info!(sandbox = id, pod = metadata.name, namespace = metadata.namespace, "sandbox runs");
        self.adopt_sandbox(record, Live { shim, init_pid });
        self.event(&id, &id, ContainerCreatedEvent);
        self.event(&id, &id, ContainerStartedEvent);
        Ok(())
    }

    /// Puts a sandbox whose shim lives into the table and listens to the shim.
    pub(crate) fn adopt_sandbox(&self, record: SandboxRecord, live: Live) {
        let shim = live.shim.clone();
        let sandbox = std::sync::Arc::new(Sandbox::new(record, SandboxState::Ready(live)));
        self.inner.sandboxes.insert(&sandbox.id, std::sync::Arc::clone(&sandbox));
        self.listen(sandbox, shim);
    }

    /// Reserves a name, or says who has it.
    pub(crate) fn reserve(&self, name: &str, id: &str) -> Result<(), Error> {
        let mut names = locked(&self.inner.names);
        if let Some(holder) = names.get(name) {
            return Err(Error::NameTaken { name: name.to_owned(), id: holder.clone() });
        }
        names.insert(name.to_owned(), id.to_owned());
        Ok(())
    }

    fn shim_config(&self, record: &SandboxRecord) -> shim::SandboxConfig {
        let config = &record.config;
        let own_network = namespaces::own_network(config);
        let root = self.inner.config.cgroup_root.trim_end_matches('/');
        shim::SandboxConfig {
            sandbox_id: record.id.clone(),
            hostname: if own_network { config.hostname.clone() } else { String::new() },
            own_network,
            own_ipc: namespaces::own_ipc(config),
            own_uts: own_network,
            share_pid: namespaces::share_pid(config),
            sysctls: config.linux.as_ref().map(|linux| linux.sysctls.clone()).unwrap_or_default(),
            shim_cgroup: format!("{root}/coracle/shims"),
            shm_dir: self.inner.records.sandbox_dir(&record.id).join("shm").to_string_lossy().into_owned(),
            oom_score_adj: self.inner.host.oom_score(-998),
            ..Default::default()
        }
    }

    /// Connects the pod and returns its addresses.
    async fn connect_pod(&self, record: &SandboxRecord, shim_pid: i32) -> Result<Vec<String>, Error> {
        let metadata = record.config.metadata.clone().unwrap_or_default();
        let attachment = Attachment {
            id: record.id.clone(),
            netns: format!("/proc/{shim_pid}/ns/net").into(),
            ifname: INTERFACE.to_owned(),
            pod_namespace: metadata.namespace,
            pod_name: metadata.name,
            pod_uid: metadata.uid,
            ports: ports(&record.config.port_mappings)?,
        };
        let attached = self.inner.network.add(&attachment).await;
        let attached = attached.map_err(|source| Error::Network { id: record.id.clone(), source })?;
        Ok(attached.addresses.iter().map(|network| network.ip().to_string()).collect())
    }

    /// Writes what does not wait for the pod's addresses.
    fn write_pod_files(&self, record: &SandboxRecord) -> Result<(), Error> {
        let dir = self.inner.records.sandbox_dir(&record.id);
        let dns = record.config.dns_config.as_ref().and_then(files::resolv_conf);
        let resolver = dns.unwrap_or_else(|| std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default());
        let hostname = format!("{}\n", self.hostname_of(&record.config));
        for (name, text) in [("resolv.conf", resolver), ("hostname", hostname)] {
            let path = dir.join(name);
            std::fs::write(&path, text).map_err(Error::file("write", &path))?;
        }
        Ok(())
    }

    fn write_hosts(&self, record: &SandboxRecord) -> Result<(), Error> {
        let text = if namespaces::own_network(&record.config) {
            files::hosts(&record.config.hostname, &record.addresses)
        } else {
            std::fs::read_to_string("/etc/hosts").unwrap_or_default()
        };
        let path = self.inner.records.sandbox_dir(&record.id).join("hosts");
        std::fs::write(&path, text).map_err(Error::file("write", &path))
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

/// An id that nobody has.
pub(super) fn new_id() -> String {
    hex::encode(rand::random::<[u8; 32]>())
}

/// Unix time in nanoseconds.
pub(crate) fn now() -> i64 {
    i64::try_from(jiff::Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX)
}

/// Refuses what cannot be done before anything is.
fn check(config: &cri::PodSandboxConfig, runtime_handler: &str) -> Result<(), Error> {
    let Some(metadata) = &config.metadata else {
        return Err(Error::invalid("config.metadata", "is missing"));
    };
    if metadata.name.is_empty() || metadata.namespace.is_empty() || metadata.uid.is_empty() {
        return Err(Error::invalid("config.metadata", "needs name, namespace and uid"));
    }
    if !runtime_handler.is_empty() {
        return Err(Error::invalid("runtime_handler", format!("there is none named {runtime_handler:?}")));
    }
    let options = namespaces::options(config);
    if options.network() == cri::NamespaceMode::Container {
        return Err(Error::invalid("namespace_options.network", "CONTAINER is no mode of a pod's network"));
    }
    if options.userns_options.is_some_and(|userns| userns.mode() == cri::NamespaceMode::Pod) {
        return Err(Error::Unsupported("a user namespace for the pod"));
    }
    Ok(())
}

/// The mappings that lead from a port of the host.
fn ports(mappings: &[cri::PortMapping]) -> Result<Vec<PortMapping>, Error> {
    let number = |port: i32| {
        u16::try_from(port).map_err(|_range| Error::invalid("port_mappings", format!("{port} is no port")))
    };
    let mut ports = Vec::new();
    for mapping in mappings.iter().filter(|mapping| mapping.host_port != 0) {
        let host_ip: Option<IpAddr> = match mapping.host_ip.as_str() {
            "" => None,
            text => Some(
                text.parse()
                    .map_err(|_not| Error::invalid("port_mappings", format!("{text:?} is no address")))?,
            ),
        };
        ports.push(PortMapping {
            host_ip,
            host_port: number(mapping.host_port)?,
            container_port: number(mapping.container_port)?,
            protocol: match mapping.protocol() {
                cri::Protocol::Tcp => Protocol::Tcp,
                cri::Protocol::Udp => Protocol::Udp,
                cri::Protocol::Sctp => Protocol::Sctp,
            },
        });
    }
    Ok(ports)
}
