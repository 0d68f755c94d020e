//! CreateContainer: record, spec, layers, process, in this order, all of it or nothing.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_images::Image;
use coracle_proto::cri::security_profile::ProfileType;
use coracle_proto::{cri, shim};
use cri::ContainerEventType::ContainerCreatedEvent;
use oci_spec::runtime::{LinuxSeccomp, Process, Spec};

use super::container_volumes::find_volumes;
use super::image_pull::check_handler;
use super::sandbox_run::{new_id, no_config, now};
use crate::cdi;
use crate::cgroup::driver::cgroups_path;
use crate::checkpoint;
use crate::container::confinement::{self, Modules};
use crate::container::devices::{self, Node};
use crate::container::oci_spec::{Facts, SandboxFacts, oci_spec};
use crate::container::user::Accounts;
use crate::container::{self, Container, fields, mount_points, profile, signal, volume};
use crate::error::{self, Error};
use crate::host::Host;
use crate::names::Claim;
use crate::records::{ContainerPhase, ContainerRecord, RestoreRecord, replace};
use crate::resize::{check_huge_pages, check_unified};
use crate::runtime::Runtime;
use crate::sandbox::user_namespace::Mapping;
use crate::sandbox::{Live, Sandbox, namespaces};
use crate::steps::Steps;
use crate::undo::{Step, Undo};

/// The spec of an exec starts from the container's own process, kept here in its bundle.
pub(super) const PROCESS_FILE: &str = "process.json";

/// Where a container comes from that is restored.
#[derive(Debug, Clone)]
pub(super) struct Origin {
    /// Its part of the pod's checkpoint.
    pub(super) archive: PathBuf,
    pub(super) restore: RestoreRecord,
}

impl Runtime {
    /// Takes the name for a new container. Refuses one that another container of the pod has, and waits for one that is
    /// being made or undone.
    pub(crate) async fn container_claim(
        &self,
        request: &cri::CreateContainerRequest,
    ) -> Result<Claim, Error> {
        let id = &request.pod_sandbox_id;
        let sandbox = self.inner.sandboxes.get(id).ok_or_else(|| Error::no_sandbox(id))?;
        let config = request.config.as_ref().ok_or_else(no_config)?;
        // As the pod is now: a container may have been added to it since.
        let pods = [Some(sandbox.config()), request.sandbox_config.as_ref()];
        check_privilege(config, pods.into_iter().flatten())?;
        self.claim_container(&sandbox, config).await
    }

    pub(super) async fn claim_container(
        &self,
        sandbox: &Sandbox,
        config: &cri::ContainerConfig,
    ) -> Result<Claim, Error> {
        check(config, &self.inner.host)?;
        fields::check_shared(config, &namespaces::options(sandbox.config()))?;
        let metadata = config.metadata.clone().unwrap_or_default();
        self.inner.names.claim(container::name(&metadata, &sandbox.id), new_id()).await
    }

    /// Makes a container that waits to be started, and has its name, and returns its id.
    pub(crate) async fn container_create(
        &self,
        request: cri::CreateContainerRequest,
        container_id: String,
    ) -> Result<cri::CreateContainerResponse, Error> {
        let id = &request.pod_sandbox_id;
        let sandbox = self.inner.sandboxes.get(id).ok_or_else(|| Error::no_sandbox(id))?;
        let config = request.config.ok_or_else(no_config)?;
        self.new_container(&sandbox, (container_id.clone(), config), None).await?;
        Ok(cri::CreateContainerResponse { container_id })
    }

    /// Makes a container that has its name, whose processes and files come from its image or from a checkpoint.
    pub(super) async fn new_container(
        &self,
        sandbox: &Sandbox,
        named: (String, cri::ContainerConfig),
        origin: Option<&Origin>,
    ) -> Result<(), Error> {
        let mut undo = Undo::new(&self.inner);
        match self.make_container(sandbox, named, origin, &mut undo).await {
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

    async fn make_container(
        &self,
        sandbox: &Sandbox,
        (id, mut config): (String, cri::ContainerConfig),
        origin: Option<&Origin>,
        undo: &mut Undo,
    ) -> Result<(), Error> {
        let inner = &self.inner;
        let mut steps = Steps::begin();
        let live = sandbox.live().ok_or_else(|| Error::WrongState {
            what: "pod sandbox",
            id: sandbox.id.clone(),
            state: "not ready",
        })?;
        let image = self.image_of(&config)?;
        if let Some(profile) = wanted_seccomp(&config)? {
            let linux = config.linux.get_or_insert_default();
            linux.security_context.get_or_insert_default().seccomp = Some(profile);
        }
        let mut held = self.hold_images(&mut config)?;
        held.push(inner.images.hold(&image.id).map_err(|source| image_error(&image.id, source))?);
        let mut record = self.new_record(sandbox, (id.clone(), config), &image)?;
        record.restore = origin.map(|origin| origin.restore.clone());
        undo.push(Step::Level(id.clone()));
        let pod = (sandbox.config(), sandbox.record.selinux.as_ref());
        record.selinux = inner.selinux.label_container(&id, &record.config, pod)?;
        undo.push(Step::ContainerRecord(id.clone()));
        inner.records.write_container(&record)?;
        coracle_fault::point("create.recorded");
        steps.done("record");
        undo.push(Step::Cgroup(record.cgroup.clone()));
        self.load_default_profile(&security(&record.config)).await?;
        let mut spec = self.make_spec(sandbox, &live, &record, &image)?;
        self.relabel_volumes(sandbox, &record).await?;
        let _pass = inner.nri.pass().await;
        self.adjust((sandbox, &live), &mut record, &mut spec, undo).await?;
        check_limits(&spec, inner.host.unified)?;
        let seccomp_program = self.seccomp_program(&spec).await?;
        let create = self.write_bundle(sandbox, &record, &image, &spec)?;
        let create = shim::CreateContainer { seccomp_program, ..create };
        self.lay_out(&record.id, origin).await?;
        coracle_fault::point("create.bundle");
        steps.done("spec and directories");
        let container = Arc::new(Container::new(record, held));
        undo.push(Step::Container(id.clone()));
        inner.containers.insert(&id, Arc::clone(&container));
        {
            let _exits_wait = container.starting.lock().await;
            undo.push(Step::ShimContainer(live.shim.clone(), id.clone()));
            let pid = self.create_in_shim(sandbox, &live, (&container, create)).await?;
            coracle_fault::point("create.made");
            steps.done("creator");
            container.created(pid);
            let telling = self.container_became(&container, ContainerCreatedEvent)?;
            coracle_fault::point("create.ready");
            telling.tell(&container);
            steps.done("ready");
        }
        self.tell_created(&container).await;
        steps.tell("CreateContainer", &id);
        Ok(())
    }

    /// Puts there what a checkpoint has of a container, beside its processes.
    async fn lay_out(&self, id: &str, origin: Option<&Origin>) -> Result<(), Error> {
        let Some(Origin { archive, .. }) = origin.cloned() else { return Ok(()) };
        let layer = self.inner.records.layer_dir(id);
        let work = tokio::task::spawn_blocking(move || checkpoint::lay_out(&archive, &layer));
        let done = work.await.map_err(|panic| Error::Kernel {
            doing: "unpack the checkpoint",
            source: std::io::Error::other(panic),
        })?;
        done.map_err(|source| Error::Checkpoint { what: "container", id: id.to_owned(), source })
    }

    pub(super) async fn load_default_profile(
        &self,
        security: &cri::LinuxContainerSecurityContext,
    ) -> Result<(), Error> {
        if !confinement::wants_default(security) {
            return Ok(());
        }
        let loaded = self.inner.default_profile.ensure().await;
        loaded.map_err(|source| Error::Kernel { doing: "load the default AppArmor profile", source })
    }

    pub(super) fn image_of(&self, config: &cri::ContainerConfig) -> Result<Image, Error> {
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
        (id, config): (String, cri::ContainerConfig),
        image: &Image,
    ) -> Result<ContainerRecord, Error> {
        let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
        let user = Accounts::read(&image.layers)
            .resolve(security, image.user())
            .map_err(|why| Error::invalid("user", why))?;
        let options = security.and_then(|security| security.namespace_options.as_ref());
        Mapping::of_container(&namespaces::options(sandbox.config()), options)
            .and_then(|mapping| mapping.map_or(Ok(()), |mapping| mapping.check_ids(user.uid, &user.groups)))
            .map_err(|why| Error::invalid("namespace_options.userns_options", why))?;
        let stop_signal = signal::stop_signal(config.stop_signal(), image.stop_signal())
            .map_err(|why| Error::invalid("stop_signal", why))?;
        let cgroup = self.inner.layout.container(&self.pod_cgroup(sandbox), &id);
        Ok(ContainerRecord {
            version: ContainerRecord::VERSION,
            sandbox_id: sandbox.id.clone(),
            phase: ContainerPhase::Creating,
            created_at: now(),
            image_id: image.id.clone(),
            image_digest: container::image_digest(&config, &image.digests),
            log_path: container::log_path(&config, sandbox.config()),
            cgroup,
            stop_signal,
            uid: user.uid.into(),
            gid: user.gid.into(),
            groups: user.groups.iter().map(|gid| i64::from(*gid)).collect(),
            late_hooks: false,
            selinux: None,
            pid: 0,
            restore: None,
            transitions: Vec::new(),
            config,
            id,
        })
    }

    /// Writes spec and process, makes the directories, and says what the shim must do.
    fn write_bundle(
        &self,
        sandbox: &Sandbox,
        record: &ContainerRecord,
        image: &Image,
        spec: &Spec,
    ) -> Result<shim::CreateContainer, Error> {
        let inner = &self.inner;
        let bundle = inner.records.container_dir(&record.id);
        let layer = inner.records.make_layer(&record.id)?;
        let (upper, work, rootfs) = (layer.join("upper"), layer.join("work"), bundle.join("rootfs"));
        for dir in [&upper, &work, &rootfs] {
            make_dir(dir)?;
        }
        // The root directory in there, whatever our umask is.
        let all = Permissions::from_mode(0o755);
        std::fs::set_permissions(&upper, all).map_err(Error::file("open to all", &upper))?;
        if let Some(mapping) = Mapping::of(Some(&namespaces::options(sandbox.config()))).ok().flatten() {
            // What is the root directory in there must be root's in there.
            let (uid, gid) = mapping.root();
            std::os::unix::fs::chown(&upper, Some(uid), Some(gid))
                .map_err(Error::file("give away", &upper))?;
        }
        if let Some(dir) = Path::new(&record.log_path).parent().filter(|dir| *dir != Path::new("")) {
            make_dir(dir)?;
        }
        write_json(&bundle.join("config.json"), spec)?;
        write_json(&bundle.join(PROCESS_FILE), spec.process())?;
        let images = self.image_volumes(&record.config, &bundle)?;
        let call = self.create_call(record, image, [bundle, upper, work, rootfs]);
        Ok(shim::CreateContainer { images, ..call })
    }

    /// Works the spec out, before plugins adjust it.
    fn make_spec(
        &self,
        sandbox: &Sandbox,
        live: &Live,
        record: &ContainerRecord,
        image: &Image,
    ) -> Result<Spec, Error> {
        let inner = &self.inner;
        let mut config = record.config.clone();
        find_volumes(&mut config, &inner.records.container_dir(&record.id))?;
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
            rootfs: &inner.records.container_dir(&record.id).join("rootfs"),
            cgroup: &cgroups_path(&record.cgroup),
            devices: &nodes,
            seccomp_file: seccomp_file(&config)?,
            apparmor: apparmor(&config)?,
            selinux: record.selinux.as_ref(),
        };
        let mut spec = oci_spec(&facts)?;
        cdi::requested(&config)
            .and_then(|devices| cdi::inject(&mut spec, &devices, &inner.config.cdi_dirs))
            .map_err(|why| Error::invalid("CDI_devices", error::chain(&why)))?;
        Ok(spec)
    }

    fn create_call(
        &self,
        record: &ContainerRecord,
        image: &Image,
        [bundle, upper, work, target]: [PathBuf; 4],
    ) -> shim::CreateContainer {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let mount_points = mount_points::layer(&self.inner.config.root);
        shim::CreateContainer {
            container_id: record.id.clone(),
            bundle: text(&bundle),
            rootfs: Some(shim::Overlay {
                lower: image.layers.iter().chain([&mount_points]).map(|layer| text(layer)).collect(),
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
            images: Vec::new(),
            seccomp_program: Vec::new(),
        }
    }

    async fn seccomp_program(&self, spec: &Spec) -> Result<Vec<u8>, Error> {
        let profile = spec.linux().as_ref().and_then(|linux| linux.seccomp().as_ref());
        let Some(profile) = profile else { return Ok(Vec::new()) };
        let program = self.inner.filters.program(profile).await;
        let program = program.map_err(|why| Error::invalid("seccomp", error::chain(&why)))?;
        Ok(program.to_vec())
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
}

/// Refuses what cannot be done before anything is.
pub(super) fn check(config: &cri::ContainerConfig, host: &Host) -> Result<(), Error> {
    if config.metadata.as_ref().is_none_or(|metadata| metadata.name.is_empty()) {
        return Err(Error::invalid("config.metadata", "needs a name"));
    }
    if config.windows.is_some() {
        return Err(Error::invalid("config.windows", "this is Linux"));
    }
    config.image.as_ref().map_or(Ok(()), check_handler)?;
    fields::check(config)?;
    wanted_seccomp(config)?;
    let resources = config.linux.as_ref().and_then(|linux| linux.resources.as_ref());
    let pages = resources.map(|resources| resources.hugepage_limits.as_slice()).unwrap_or_default();
    check_huge_pages(pages, host.hugetlb)?;
    config.mounts.iter().try_for_each(|mount| volume::check(mount, host.kernel))
}

/// Refuses a privileged container in a pod that was not said to have any.
fn check_privilege<'a>(
    config: &cri::ContainerConfig,
    mut pods: impl Iterator<Item = &'a cri::PodSandboxConfig>,
) -> Result<(), Error> {
    let expected = pods.any(|pod| namespaces::security(pod).is_some_and(|security| security.privileged));
    if security(config).privileged && !expected {
        let why = "its pod sandbox is not for privileged containers";
        return Err(Error::invalid("config.linux.security_context.privileged", why));
    }
    Ok(())
}

/// The seccomp profile, in the field of today or of old.
fn wanted_seccomp(config: &cri::ContainerConfig) -> Result<Option<cri::SecurityProfile>, Error> {
    let security = security(config);
    #[allow(deprecated, reason = "older kubelets set it")]
    let old = security.seccomp_profile_path.as_str();
    profile::wanted_seccomp(security.seccomp.as_ref(), old)
}

/// Refuses limits by file, as the client and plugins ask for, that are not limits. An update refuses the same.
fn check_limits(spec: &Spec, unified: bool) -> Result<(), Error> {
    let resources = spec.linux().as_ref().and_then(|linux| linux.resources().as_ref());
    let files = resources.and_then(|resources| resources.unified().as_ref());
    check_unified(files.into_iter().flat_map(|files| files.keys()), unified)
}

fn nodes(config: &cri::ContainerConfig) -> Result<Vec<Node>, Error> {
    let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    if security.is_some_and(|security| security.privileged) {
        return Ok(devices::all());
    }
    devices::requested(&config.devices)
}

fn security(config: &cri::ContainerConfig) -> cri::LinuxContainerSecurityContext {
    config.linux.as_ref().and_then(|linux| linux.security_context.clone()).unwrap_or_default()
}

/// The AppArmor profile.
fn apparmor(config: &cri::ContainerConfig) -> Result<Option<String>, Error> {
    confinement::apparmor(&security(config), &Modules::look()).map_err(|why| Error::invalid("apparmor", why))
}

fn seccomp_file(config: &cri::ContainerConfig) -> Result<Option<LinuxSeccomp>, Error> {
    let security = security(config);
    let asked = security.seccomp.filter(|_| !security.privileged);
    let own = asked.filter(|profile| profile.profile_type() == ProfileType::Localhost);
    own.as_ref().map(profile::read_seccomp).transpose()
}

pub(super) fn make_dir(dir: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(dir).map_err(Error::file("make directory", dir))
}

/// The process of which an exec is a copy.
pub(super) fn read_process(path: &Path) -> Result<Process, Error> {
    let bytes = std::fs::read(path).map_err(Error::file("read", path))?;
    let failed = |source| Error::Format { doing: "decode", path: path.to_owned(), source };
    serde_json::from_slice(&bytes).map_err(failed)
}

pub(super) fn write_json<T: serde::Serialize>(path: &Path, value: &T) -> Result<(), Error> {
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
