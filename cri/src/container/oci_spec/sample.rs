//! Sample host, image and pod for specs of tests and fuzz targets.
#![allow(clippy::expect_used, reason = "the sample values are valid")]

use std::path::Path;
use std::sync::Arc;

use coracle_images::Image;
use coracle_proto::cri::{ContainerConfig, PodSandboxConfig};
use oci_spec::image::{ConfigBuilder, ImageConfigurationBuilder, RootFsBuilder};

use super::*;
use crate::container::inputs::SandboxInputs;
use crate::host::Host;

/// An image with an entrypoint, arguments and an environment.
pub(crate) fn image(entrypoint: &[&str], cmd: &[&str], env: &[&str]) -> Image {
    let strings = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<String>>();
    let config = ConfigBuilder::default()
        .entrypoint(strings(entrypoint))
        .cmd(strings(cmd))
        .env(strings(env))
        .build()
        .expect("config");
    let rootfs =
        RootFsBuilder::default().typ("layers").diff_ids(Vec::<String>::new()).build().expect("rootfs");
    let config = ImageConfigurationBuilder::default()
        .config(config)
        .rootfs(rootfs)
        .build()
        .expect("image configuration");
    Image {
        id: "sha256:0".into(),
        tags: Vec::new(),
        digests: Vec::new(),
        size: 0,
        config: Arc::new(config),
        layers: Vec::new(),
        pinned: false,
    }
}

/// A host with many features and few capabilities.
pub(crate) fn host() -> Host {
    Host {
        capabilities: vec!["CAP_CHOWN".into(), "CAP_KILL".into(), "CAP_SYS_ADMIN".into()],
        oom_floor: Some(0),
        unified: false,
        hugetlb: false,
        kernel: crate::host::Kernel { user_namespaces: true, recursive_read_only: true },
        hostname: "node".into(),
    }
}

/// The spec of a container in a pod with its own namespaces.
pub(crate) fn spec(config: &ContainerConfig, sandbox: &PodSandboxConfig, host: &Host) -> Result<Spec, Error> {
    spec_of_image(&image(&["run"], &[], &[]), config, sandbox, host)
}

/// The spec of a container of this image, in a pod with its own namespaces.
pub(crate) fn spec_of_image(
    image: &Image,
    config: &ContainerConfig,
    sandbox: &PodSandboxConfig,
    host: &Host,
) -> Result<Spec, Error> {
    oci_spec(&SpecInputs {
        config,
        image,
        host,
        user: &User::default(),
        sandbox: SandboxInputs {
            config: sandbox,
            hostname: "pod".into(),
            dir: "/s".into(),
            shm_dir: "/s/shm".into(),
            shim_pid: 42,
            init_pid: 43,
            target_pid: 7,
        },
        rootfs: Path::new("/c/rootfs"),
        cgroup: "/kubepods/pod1/c",
        devices: &[],
        seccomp_file: None,
        apparmor: None,
        selinux: None,
    })
}
