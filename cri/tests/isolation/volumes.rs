//! Recursively read-only volumes, and images as volumes.

use coracle_proto::cri;
use coracle_proto::cri::image_service_server::ImageService;
use nix::mount::{MsFlags, mount};
use tonic::Request;

use super::sh;
use super::user_namespace::{container, options, pod, range};
use crate::fixture::{IMAGE, Machine};

pub(super) async fn recursive_read_only_covers_submounts(machine: &mut Machine) {
    // A mount that was made after the pod's start is visible too, on a node without shared mounts.
    let pod = machine.pod("rro").await;
    let dir = tempfile::tempdir().expect("directory");
    let below = dir.path().join("below");
    std::fs::create_dir(&below).expect("directory");
    let none = None::<&str>;
    mount(Some("below"), &below, Some("tmpfs"), MsFlags::empty(), none).expect("tmpfs");
    let volume = |inside: &str, recursive| cri::Mount {
        container_path: inside.into(),
        host_path: dir.path().to_string_lossy().into_owned(),
        readonly: true,
        recursive_read_only: recursive,
        ..Default::default()
    };
    let id = machine
        .create(&pod, "c", &["sleep", "1000"], |config| {
            config.mounts = vec![volume("/plain", false), volume("/deep", true)];
        })
        .await
        .expect("create");
    machine.start(&id).await;
    sh(machine, &id, "! touch /plain/x 2>/dev/null && touch /plain/below/x").await;
    sh(
        machine,
        &id,
        "test -e /deep/below/x && ! touch /deep/x 2>/dev/null && ! touch /deep/below/y 2>/dev/null",
    )
    .await;
    let mut writable = volume("/v", true);
    writable.readonly = false;
    let refused = machine.create(&pod, "w", &["true"], |config| config.mounts = vec![writable]).await;
    assert_eq!(refused.expect_err("not read-only").code(), tonic::Code::InvalidArgument);
    machine.remove_pod(&pod).await;
    nix::mount::umount2(&below, nix::mount::MntFlags::MNT_DETACH).expect("unmount");
}

pub(super) async fn a_volume_does_not_hide_files_of_the_pod(machine: &mut Machine) {
    let pod = machine.pod("above").await;
    let dir = tempfile::tempdir().expect("directory");
    std::fs::write(dir.path().join("passwd"), "root:x:0:0::/root:/bin/sh\n").expect("file");
    let volume = cri::Mount {
        container_path: "/etc".into(),
        host_path: dir.path().to_string_lossy().into_owned(),
        ..Default::default()
    };
    let create = machine.create(&pod, "c", &["sleep", "1000"], |config| config.mounts = vec![volume]);
    let id = create.await.expect("create");
    machine.start(&id).await;
    sh(machine, &id, "grep -q 10.43.0.10 /etc/resolv.conf && grep -q host-above /etc/hostname").await;
    sh(machine, &id, "grep -q host-above /etc/hosts && test -s /etc/passwd").await;
    machine.remove_pod(&pod).await;
}

fn image(inside: &str, sub_path: &str) -> cri::Mount {
    cri::Mount {
        container_path: inside.into(),
        readonly: true,
        image: Some(cri::ImageSpec { image: IMAGE.into(), ..Default::default() }),
        image_sub_path: sub_path.into(),
        ..Default::default()
    }
}

pub(super) async fn an_image_volume_can_have_a_sub_path(machine: &mut Machine) {
    let pod = machine.pod("image").await;
    let before = machine.traces().await;
    let mounts = vec![image("/image", ""), image("/bins", "bin"), image("/one", "etc/passwd")];
    let id = machine
        .create(&pod, "c", &["sleep", "1000"], |config| config.mounts = mounts.clone())
        .await
        .expect("create");
    machine.start(&id).await;
    sh(machine, &id, "test -e /image/etc/passwd && /bins/busybox true && grep -q root /one").await;
    sh(machine, &id, "! touch /image/x 2>/dev/null && ! touch /bins/x 2>/dev/null && ! echo > /one").await;
    let status = machine.status(&id).await;
    assert_eq!(status.mounts.len(), mounts.len());
    for mount in &status.mounts {
        assert_eq!(mount.image.as_ref().expect("an image").image_ref, status.image_id);
        assert_eq!(mount.host_path, "");
    }
    machine.restart(std::time::Duration::from_millis(100)).await;
    sh(machine, &id, "test -e /image/etc/passwd").await;
    machine.remove(&id).await;
    assert_eq!(machine.traces().await, before);
    let absent =
        machine.create(&pod, "a", &["true"], |config| config.mounts = vec![image("/v", "no/such")]).await;
    assert!(absent.expect_err("no such directory").message().contains("no/such"));
    let mut unknown = image("/v", "");
    unknown.image.as_mut().expect("an image").image = "registry.test/none:latest".into();
    let unknown = machine.create(&pod, "u", &["true"], |config| config.mounts = vec![unknown]).await;
    assert_eq!(unknown.expect_err("no such image").code(), tonic::Code::NotFound);
    let escape =
        machine.create(&pod, "e", &["true"], |config| config.mounts = vec![image("/v", "../..")]).await;
    assert_eq!(escape.expect_err("outside").code(), tonic::Code::InvalidArgument);
    assert_eq!(machine.traces().await, before);
    machine.remove_pod(&pod).await;
    let list = machine.runtime.list_images(Request::new(cri::ListImagesRequest::default())).await;
    assert_eq!(list.expect("images").into_inner().images.len(), 1);
}

pub(super) async fn an_image_is_a_volume_of_a_pod_with_a_user_namespace(machine: &mut Machine) {
    let options = options(range());
    let pod = pod(machine, "userns-image", &options).await.expect("sandbox");
    let id = container(machine, &pod, &options, |config| {
        config.mounts = vec![image("/image", ""), image("/bins", "bin")];
    })
    .await;
    let owners = sh(machine, &id, "stat -c %u /image /image/etc/passwd /bins /bins/busybox | sort -u").await;
    assert_eq!(owners, "0");
    sh(machine, &id, "/bins/busybox true && ! touch /image/x 2>/dev/null").await;
    machine.remove_pod(&pod).await;
}
