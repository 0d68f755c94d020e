//! CreateContainer: record, spec, layers, process, in this order, all of it or nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_images::Image;
use coracle_proto::cri::security_profile::ProfileType;
use coracle_proto::{cri, shim};
use cri::ContainerEventType::ContainerCreatedEvent;
use oci_spec::runtime::LinuxSeccomp;

use super::sandbox_run::{new_id, now};
use crate::container::devices::{self, Node};
use crate::container::oci_spec::{Facts, SandboxFacts, oci_spec};
use crate::container::user::Accounts;
use crate::container::{self, Container, signal};
use crate::error::Error;
use crate::records::{ContainerPhase, ContainerRecord, replace};
use crate::runtime::Runtime;
use crate::sandbox::{Live, Sandbox};
use crate::undo::{Step, Undo};

/// The spec of an exec starts from the container's own process, kept here in its bundle.
pub(super) const PROCESS_FILE: &str = "process.json";

impl Runtime {
    /// Makes a container that waits to be started, and returns its id.
    pub(crate) async fn container_create(
        &self,
        request: cri::CreateContainerRequest,
    ) -> Result<cri::CreateContainerResponse, Error> {
        let id = &request.pod_sandbox_id;
        let sandbox = self.inner.sandboxes.get(id).ok_or_else(|| Error::no_sandbox(id))?;
        let config = request.config.ok_or_else(|| Error::invalid("config", "is missing"))?;
        check(&config)?;
        let mut undo = Undo::new(&self.inner);
        match self.make_container(&sandbox, config, &mut undo).await {
            Ok(container_id) => {
                undo.keep();
                Ok(cri::CreateContainerResponse { container_id })
            }
            Err(error) => {
                undo.run().await;
                Err(error)
            }
        }
    }

    async fn make_container(
        &self,
        sandbox: &Sandbox,
        config: cri::ContainerConfig,
        undo: &mut Undo,
    ) -> Result<String, Error> {
        let inner = &self.inner;
        let live = sandbox.live().ok_or_else(|| Error::WrongState {
            what: "pod sandbox",
            id: sandbox.id.clone(),
            state: "not ready",
        })?;
        let image = self.image_of(&config)?;
        let held = inner.images.hold(&image.id).map_err(|source| image_error(&image.id, source))?;
        let record = self.new_record(sandbox, config, &image)?;
        let id = record.id.clone();
        let name = container::name(&record.config.metadata.clone().unwrap_or_default(), &sandbox.id);
        self.reserve(&name, &id)?;
        undo.push(Step::Name(name));
        undo.push(Step::ContainerRecord(id.clone()));
        inner.records.write_container(&record)?;
        undo.push(Step::Cgroup(record.cgroup.clone()));
        let create = self.write_bundle(sandbox, &live, &record, &image)?;
        let container = Arc::new(Container::new(record, Some(held)));
        undo.push(Step::Container(id.clone()));
        inner.containers.insert(&id, Arc::clone(&container));
        {
            let _exits_wait = container.starting.lock().await;
            undo.push(Step::ShimContainer(live.shim.clone(), id.clone()));
            let pid = live.shim.create(create).await.map_err(Error::shim("create the container"))?;
            container.created(pid);
            inner.records.write_container(&container.record_now())?;
            self.event(&sandbox.id, &id, ContainerCreatedEvent);
        }
        Ok(id)
    }

    fn image_of(&self, config: &cri::ContainerConfig) -> Result<Image, Error> {
        let reference = config.image.as_ref().map(|image| image.image.as_str()).unwrap_or_default();
        if reference.is_empty() {
            return Err(Error::invalid("config.image", "is missing"));
        }
        self.inner
            .images
            .get(reference)
            .ok_or_else(|| Error::NotFound { what: "image", id: reference.to_owned() })
    }

    fn new_record(
        &self,
        sandbox: &Sandbox,
        config: cri::ContainerConfig,
        image: &Image,
    ) -> Result<ContainerRecord, Error> {
        let id = new_id();
        let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
        let user = Accounts::read(&image.layers)
            .resolve(security, image.user())
            .map_err(|why| Error::invalid("user", why))?;
        let stop_signal = signal::stop_signal(config.stop_signal(), image.stop_signal())
            .map_err(|why| Error::invalid("stop_signal", why))?;
        let parent = sandbox.config().linux.as_ref().map(|linux| linux.cgroup_parent.as_str());
        let cgroup = match parent {
            None | Some("") => format!("{}/{id}", self.own_pod_cgroup(&sandbox.id)),
            Some(parent) => format!("/{}/{id}", parent.trim_matches('/')),
        };
        Ok(ContainerRecord {
            version: ContainerRecord::VERSION,
            sandbox_id: sandbox.id.clone(),
            phase: ContainerPhase::Creating,
            created_at: now(),
            image_id: image.id.clone(),
            log_path: container::log_path(&config, sandbox.config()),
            cgroup,
            stop_signal,
            uid: user.uid.into(),
            gid: user.gid.into(),
            groups: user.groups.iter().map(|gid| i64::from(*gid)).collect(),
            pid: 0,
            config,
            id,
        })
    }

    /// Writes spec and process, makes the directories, and says what the shim must do.
    fn write_bundle(
        &self,
        sandbox: &Sandbox,
        live: &Live,
        record: &ContainerRecord,
        image: &Image,
    ) -> Result<shim::CreateContainer, Error> {
        let inner = &self.inner;
        let bundle = inner.records.container_dir(&record.id);
        let layer = inner.records.layer_dir(&record.id);
        let (upper, work, rootfs) = (layer.join("upper"), layer.join("work"), bundle.join("rootfs"));
        for dir in [&upper, &work, &rootfs] {
            make_dir(dir)?;
        }
        if let Some(dir) = Path::new(&record.log_path).parent().filter(|dir| *dir != Path::new("")) {
            make_dir(dir)?;
        }
        let mut config = record.config.clone();
        find_volumes(&mut config)?;
        let nodes = nodes(&config)?;
        let facts = Facts {
            config: &config,
            image,
            host: &inner.host,
            user: &container::user::User {
                uid: u32::try_from(record.uid).unwrap_or_default(),
                gid: u32::try_from(record.gid).unwrap_or_default(),
                groups: record.groups.iter().filter_map(|gid| u32::try_from(*gid).ok()).collect(),
            },
            sandbox: self.sandbox_facts(sandbox, live, &config)?,
            rootfs: &rootfs,
            cgroup: &record.cgroup,
            devices: &nodes,
            seccomp_file: seccomp_file(&config)?,
        };
        let spec = oci_spec(&facts)?;
        write_json(&bundle.join("config.json"), &spec)?;
        write_json(&bundle.join(PROCESS_FILE), spec.process())?;
        Ok(self.create_call(record, image, [bundle, upper, work, rootfs]))
    }

    fn create_call(
        &self,
        record: &ContainerRecord,
        image: &Image,
        [bundle, upper, work, target]: [PathBuf; 4],
    ) -> shim::CreateContainer {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        shim::CreateContainer {
            container_id: record.id.clone(),
            bundle: text(&bundle),
            rootfs: Some(shim::Overlay {
                lower: image.layers.iter().map(|layer| text(layer)).collect(),
                upper: text(&upper),
                work: text(&work),
                target: text(&target),
                // The container library makes the root read-only after its mount points exist.
                read_only: false,
            }),
            terminal: record.config.tty,
            stdin: record.config.stdin,
            stdin_once: record.config.stdin_once,
            log_path: record.log_path.clone(),
            log_max_size: self.inner.config.log_max_size,
            log_max_files: self.inner.config.log_max_files,
        }
    }

    fn sandbox_facts<'a>(
        &self,
        sandbox: &'a Sandbox,
        live: &Live,
        config: &cri::ContainerConfig,
    ) -> Result<SandboxFacts<'a>, Error> {
        let dir = self.inner.records.sandbox_dir(&sandbox.id);
        let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
        let options = security.and_then(|security| security.namespace_options.as_ref());
        let target_pid = match options.filter(|options| options.pid() == cri::NamespaceMode::Target) {
            None => 0,
            Some(options) => self.target_pid(sandbox, &options.target_id)?,
        };
        Ok(SandboxFacts {
            config: sandbox.config(),
            hostname: self.hostname_of(sandbox.config()),
            shm_dir: dir.join("shm"),
            dir,
            shim_pid: live.shim.pid(),
            init_pid: live.init_pid,
            target_pid,
        })
    }

    /// The first process of a container of the same pod.
    fn target_pid(&self, sandbox: &Sandbox, id: &str) -> Result<i32, Error> {
        let target = self.inner.containers.get(id).filter(|target| target.record.sandbox_id == sandbox.id);
        let target = target.ok_or_else(|| Error::no_container(id))?;
        match target.phase() {
            ContainerPhase::Running { .. } => Ok(target.pid()),
            _ => Err(Error::WrongState {
                what: "target container",
                id: target.id.clone(),
                state: "not running",
            }),
        }
    }
}

/// Refuses what cannot be done before anything is.
fn check(config: &cri::ContainerConfig) -> Result<(), Error> {
    if config.metadata.as_ref().is_none_or(|metadata| metadata.name.is_empty()) {
        return Err(Error::invalid("config.metadata", "needs a name"));
    }
    if !config.cdi_devices.is_empty() {
        return Err(Error::Unsupported("a CDI device"));
    }
    for mount in &config.mounts {
        if mount.image.is_some() {
            return Err(Error::Unsupported("an image as a volume"));
        }
        if !mount.uid_mappings.is_empty() || !mount.gid_mappings.is_empty() {
            return Err(Error::Unsupported("a volume with mapped ids"));
        }
        if !mount.container_path.starts_with('/') {
            return Err(Error::invalid("mounts.container_path", "must be absolute"));
        }
        if mount.recursive_read_only && (!mount.readonly || mount.propagation != 0) {
            return Err(Error::invalid(
                "mounts.recursive_read_only",
                "needs readonly and private propagation",
            ));
        }
    }
    Ok(())
}

/// Follows links of the sources, and makes those that are absent, as docker always has.
fn find_volumes(config: &mut cri::ContainerConfig) -> Result<(), Error> {
    for mount in &mut config.mounts {
        let path = Path::new(&mount.host_path);
        if !path.exists() {
            make_dir(path)?;
        }
        let real = path.canonicalize().map_err(Error::file("find volume", path))?;
        mount.host_path = real.to_string_lossy().into_owned();
    }
    Ok(())
}

fn nodes(config: &cri::ContainerConfig) -> Result<Vec<Node>, Error> {
    let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    if security.is_some_and(|security| security.privileged) {
        return Ok(devices::all());
    }
    devices::requested(&config.devices)
}

fn seccomp_file(config: &cri::ContainerConfig) -> Result<Option<LinuxSeccomp>, Error> {
    let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    let profile =
        security.filter(|security| !security.privileged).and_then(|security| security.seccomp.as_ref());
    let Some(profile) = profile.filter(|profile| profile.profile_type() == ProfileType::Localhost) else {
        return Ok(None);
    };
    let path = PathBuf::from(profile.localhost_ref.trim_start_matches("localhost/"));
    if !path.is_absolute() {
        return Err(Error::invalid("seccomp.localhost_ref", "must be an absolute path"));
    }
    let bytes = std::fs::read(&path).map_err(Error::file("read seccomp profile", &path))?;
    serde_json::from_slice(&bytes).map(Some).map_err(|source| Error::Format {
        doing: "read seccomp profile",
        path,
        source,
    })
}

fn make_dir(dir: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(dir).map_err(Error::file("make directory", dir))
}

fn write_json<T: serde::Serialize>(path: &Path, value: &T) -> Result<(), Error> {
    let bytes = serde_json::to_vec(value).map_err(|source| Error::Format {
        doing: "encode",
        path: path.to_owned(),
        source,
    })?;
    replace(path, &bytes)
}

pub(super) fn image_error(reference: &str, source: coracle_images::Error) -> Error {
    Error::Image { reference: reference.to_owned(), source }
}
