//! Claims of a pod: from the claim to its volume, and from the volume to a directory on this node.
//!
//! The volume of each claim is recorded in the pod's directory. So a pod that has started keeps its volumes while the
//! API server does not answer.

use std::io;
use std::path::{Path, PathBuf};

use coracle_cri::blocking::FileWork;
use coracle_values::node_selector::term_matches;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod, Volume};
use kube::Api;
use tokio::sync::Mutex;

use super::error::{SetUpError, VolumeError};
use super::{Mounted, Target, host_path, local, mount_options, mounts, nfs, run_blocking};
use crate::json_file;

/// Held from the search for other users of a volume, which only one pod may use, until the volume is recorded.
/// Otherwise two pods could both find the volume unused.
static EXCLUSIVE: Mutex<()> = Mutex::const_new(());
/// Searches for other users of a volume.
static SEARCHES: FileWork = FileWork::new(1);

/// The claim of a volume.
struct Claim {
    name: String,
    read_only: bool,
    is_ephemeral: bool,
}

/// Mounts a volume that refers to a claim. `None` if the volume has no claim.
pub(super) async fn mount(target: &Target<'_>, volume: &Volume) -> Option<Result<Mounted, VolumeError>> {
    let claim = claim_of(target.pod, volume)?;
    Some(mount_claim(target, &volume.name, &claim).await)
}

fn claim_of(pod: &Pod, volume: &Volume) -> Option<Claim> {
    if let Some(named) = &volume.persistent_volume_claim {
        let read_only = named.read_only == Some(true);
        return Some(Claim { name: named.claim_name.clone(), read_only, is_ephemeral: false });
    }
    volume.ephemeral.as_ref()?;
    let pod = pod.metadata.name.as_deref().unwrap_or_default();
    Some(Claim { name: format!("{pod}-{}", volume.name), read_only: false, is_ephemeral: true })
}

/// The record of a claim's volume, in the pod's directory.
fn record_of(pod_dir: &Path, volume: &str) -> PathBuf {
    pod_dir.join("claims").join(format!("{volume}.json"))
}

/// The claim of a volume, and the directory of a local volume or of a mounted NFS export. None for other volumes. Does
/// not access the volume.
pub(super) fn measured(pods_dir: &Path, pod: &Pod, volume: &Volume) -> Option<(String, PathBuf)> {
    let claim = claim_of(pod, volume)?;
    let dir = pods_dir.join(pod.metadata.uid.as_deref()?);
    let source = read(&record_of(&dir, &volume.name))?.spec?;
    if let Some(local) = source.local {
        return Some((claim.name, local.path.into()));
    }
    source.nfs.as_ref()?;
    let path = dir.join("volumes").join(nfs::PLUGIN).join(&volume.name);
    mounts::is_mount_point(&path).ok()?.then_some((claim.name, path))
}

async fn mount_claim(target: &Target<'_>, volume: &str, claim: &Claim) -> Result<Mounted, VolumeError> {
    let record = record_of(&target.ctx.pod_dir(target.uid), volume);
    let recorded = read(&record);
    let health = &target.ctx.shared.health;
    let found =
        if recorded.is_some() && health.is_unavailable() { None } else { Some(resolve(target, claim).await) };
    let persistent = match (found, recorded) {
        (Some(Ok(persistent)), _) => persistent,
        // The API server does not answer, or refuses this node. Use the recorded volume, with which the pod has
        // started.
        (Some(Err(Unresolved::NoAnswer(_))) | None, Some(recorded)) => recorded,
        (Some(Err(Unresolved::NoAnswer(why) | Unresolved::Refused(why))), _) => {
            return Err(VolumeError::Claim {
                volume: volume.to_owned(),
                claim: format!("{}/{}", target.namespace, claim.name),
                reason: why,
            });
        }
        (None, None) => return Err(VolumeError::NoIdentity),
    };
    // Write the record first: it protects the directory of a local volume while the pod uses it.
    let failed = |reason| VolumeError::SetUp { volume: volume.to_owned(), reason };
    record_volume(target.ctx.pods_dir(), target.uid, &record, &persistent).await.map_err(failed)?;
    mount_source(target, volume, &persistent, claim.read_only).await
}

/// Records the volume of the pod with this uid, unless only one pod may use the volume and another pod uses it. A pod
/// that has the record already keeps the volume.
///
/// Cancel safe: the record of a pod that was removed in the meantime would keep the volume from all other pods. So only
/// the search runs on a thread, which outlives the call.
async fn record_volume(
    pods_dir: &Path,
    uid: &str,
    record: &Path,
    volume: &PersistentVolume,
) -> Result<(), SetUpError> {
    let is_recorded = || read(record).is_some_and(|known| known.metadata.name == volume.metadata.name);
    if !is_exclusive(volume) || is_recorded() {
        return write(record, volume).map_err(SetUpError::io("write", record));
    }
    let _one_at_a_time = EXCLUSIVE.lock().await;
    let name = volume.metadata.name.clone().unwrap_or_default();
    let (pods, uid) = (pods_dir.to_owned(), uid.to_owned());
    let used = SEARCHES.run(move || is_used_by_others(&pods, &uid, &name)).await.unwrap_or_else(Err);
    if used.map_err(SetUpError::io("read", pods_dir))? {
        return Err(SetUpError::InUse);
    }
    write(record, volume).map_err(SetUpError::io("write", record))
}

/// Whether only one pod may use the volume. As upstream, this applies to local volumes, and not if the volume also has
/// other access modes (`GenerateMountVolumeFunc`, `AddPodToVolume`).
fn is_exclusive(volume: &PersistentVolume) -> bool {
    let spec = volume.spec.as_ref().filter(|spec| spec.local.is_some());
    spec.and_then(|spec| spec.access_modes.as_ref()).is_some_and(|modes| *modes == ["ReadWriteOncePod"])
}

/// Whether a pod on this node uses the volume. The record of a pod exists until its volumes are removed.
///
/// # Errors
/// A record cannot be read: its pod may use the volume.
pub(super) fn is_in_use(pods_dir: &Path, volume: &str) -> io::Result<bool> {
    is_used_by_others(pods_dir, "", volume)
}

/// Like [`is_in_use`], without the pod with this uid.
fn is_used_by_others(pods_dir: &Path, uid: &str, volume: &str) -> io::Result<bool> {
    let own = pods_dir.join(uid);
    let mut unreadable = None;
    for pod in entries(pods_dir)?.into_iter().filter(|pod| *pod != own) {
        for record in entries(&pod.join("claims"))? {
            // A temporary file is left by an interrupted write. The write precedes the start of the pod, so the pod has
            // not started.
            if record.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            match read_strictly(&record) {
                Ok(found) if found.metadata.name.as_deref() == Some(volume) => return Ok(true),
                Ok(_) => {}
                // The pod was removed in between.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => unreadable = Some(unreadable_record(&record, &error)),
            }
        }
    }
    unreadable.map_or(Ok(false), Err)
}

fn unreadable_record(record: &Path, error: &io::Error) -> io::Error {
    let record = record.display();
    io::Error::new(error.kind(), format!("cannot read {record}: {error}; its pod may use the volume"))
}

/// The paths in a directory. Empty if the directory is absent or a file is in its place.
fn entries(dir: &Path) -> io::Result<Vec<PathBuf>> {
    match std::fs::read_dir(dir) {
        Ok(entries) => entries.map(|entry| entry.map(|entry| entry.path())).collect(),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(Vec::new())
        }
        Err(error) => Err(unreadable_record(dir, &error)),
    }
}

/// The reason why the volume of a claim is not known.
enum Unresolved {
    /// The API server did not answer, or refused this node's request.
    NoAnswer(String),
    /// The claim cannot be used now.
    Refused(String),
}

fn request(error: &kube::Error) -> Unresolved {
    match error {
        kube::Error::Api(status) if status.is_not_found() => Unresolved::Refused(status.message.clone()),
        other => Unresolved::NoAnswer(coracle_error_chain::chain(other)),
    }
}

async fn resolve(target: &Target<'_>, claim: &Claim) -> Result<PersistentVolume, Unresolved> {
    let client = &target.ctx.shared.client;
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), target.namespace);
    let found = claims.get(&claim.name).await.map_err(|error| request(&error))?;
    let name =
        usable_volume(&found, claim.is_ephemeral.then_some(target.uid)).map_err(Unresolved::Refused)?;
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let volume = volumes.get(name).await.map_err(|error| request(&error))?;
    let of = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref()).and_then(|of| of.uid.as_deref());
    if of.is_none() || of != found.metadata.uid.as_deref() {
        return Err(Unresolved::Refused(format!("PV {name} is not bound to the claim")));
    }
    check_node(target, &volume).await?;
    Ok(volume)
}

/// The name of a claim's volume. The claim of an ephemeral volume must belong to the pod with this uid.
fn usable_volume<'a>(claim: &'a PersistentVolumeClaim, owner: Option<&str>) -> Result<&'a str, String> {
    if claim.metadata.deletion_timestamp.is_some() {
        return Err("PVC is being deleted".to_owned());
    }
    let mut owners = claim.metadata.owner_references.iter().flatten();
    if owner.is_some_and(|uid| !owners.any(|owner| owner.uid == uid && owner.controller == Some(true))) {
        return Err("PVC was not created for the pod (pod is not owner)".to_owned());
    }
    let spec = claim.spec.as_ref();
    let name = spec.and_then(|spec| spec.volume_name.as_deref()).filter(|name| !name.is_empty());
    let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref());
    if spec.and_then(|spec| spec.volume_mode.as_deref()) == Some("Block") {
        return Err("volumeMode Block is not supported by this node".to_owned());
    }
    name.filter(|_| phase == Some("Bound")).ok_or_else(|| "PVC is not bound".to_owned())
}

/// Checks that the volume can be used on this node.
async fn check_node(target: &Target<'_>, volume: &PersistentVolume) -> Result<(), Unresolved> {
    let affinity = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref());
    let Some(required) = affinity.and_then(|affinity| affinity.required.as_ref()) else { return Ok(()) };
    let name = node_name(target);
    let nodes: Api<Node> = Api::all(target.ctx.shared.client.clone());
    let node = nodes.get(name).await.map_err(|error| request(&error))?;
    let labels = node.metadata.labels.unwrap_or_default();
    if required.node_selector_terms.iter().any(|term| term_matches(term, &labels, name)) {
        return Ok(());
    }
    Err(Unresolved::Refused("no matching NodeSelectorTerms: the volume is not on this node".to_owned()))
}

fn node_name<'a>(target: &Target<'a>) -> &'a str {
    target.pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

async fn mount_source(
    target: &Target<'_>,
    volume: &str,
    persistent: &PersistentVolume,
    read_only: bool,
) -> Result<Mounted, VolumeError> {
    let failed = |reason| VolumeError::SetUp { volume: volume.to_owned(), reason };
    let Some(spec) = &persistent.spec else { return Err(VolumeError::NoIdentity) };
    if let Some(source) = &spec.local {
        let options = mount_options::parse(&options_of(persistent)).map_err(failed)?;
        let read_only = read_only || options.read_only;
        let (base, node) = (target.ctx.shared.config.local_dir.clone(), node_name(target).to_owned());
        let (place, of) = (target.volume_dir(local::PLUGIN, volume), persistent.clone());
        let path = run_blocking(&place, Path::new(&source.path), move || local::mount(&base, &node, &of));
        let path = path.await.map_err(failed)?;
        if !read_only {
            local::give_to_group(target, volume, &path).await.map_err(failed)?;
        }
        return Ok(Mounted { path, read_only, options: options.flags, relabel: true, by_node: false });
    }
    if let Some(host) = &spec.host_path {
        refuse_options(&options_of(persistent)).map_err(failed)?;
        let place = target.volume_dir(host_path::PLUGIN, volume);
        let path = host_path::mount(host, &place).await.map_err(failed)?;
        return Ok(Mounted { path, read_only, ..Mounted::default() });
    }
    if let Some(source) = &spec.nfs {
        let export = nfs::Export {
            server: source.server.clone(),
            path: source.path.clone(),
            read_only: read_only || source.read_only == Some(true),
            options: options_of(persistent),
        };
        let path = target.volume_dir(nfs::PLUGIN, volume);
        nfs::mount(target.namespace, &export, &path).await.map_err(failed)?;
        return Ok(Mounted { path, read_only: export.read_only, ..Mounted::default() });
    }
    let kind = if spec.csi.is_some() { "csi" } else { "of the persistent volume" };
    Err(VolumeError::Unsupported { volume: volume.to_owned(), kind })
}

/// The mount options of a volume. The former annotation takes precedence, as upstream (`MountOptionFromSpec`).
fn options_of(volume: &PersistentVolume) -> Vec<String> {
    const ANNOTATION: &str = "volume.beta.kubernetes.io/mount-options";
    let annotation = volume.metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION));
    match annotation {
        Some(list) => list.split(',').filter(|option| !option.is_empty()).map(str::to_owned).collect(),
        None => volume.spec.as_ref().and_then(|spec| spec.mount_options.clone()).unwrap_or_default(),
    }
}

/// Refuses mount options of a type that has no mount options, as upstream (`checkMountOptionSupport`). A volume with an
/// ignored `ro` would be writable.
fn refuse_options(options: &[String]) -> Result<(), SetUpError> {
    if options.is_empty() { Ok(()) } else { Err(SetUpError::NoMountOptions) }
}

fn read(record: &Path) -> Option<PersistentVolume> {
    read_strictly(record).ok()
}

fn read_strictly(record: &Path) -> io::Result<PersistentVolume> {
    Ok(json_file::parse(&std::fs::read(record)?)?)
}

/// Records a volume, unless the record already contains the volume.
fn write(record: &Path, volume: &PersistentVolume) -> std::io::Result<()> {
    let mut volume = volume.clone();
    volume.metadata.managed_fields = None;
    volume.metadata.resource_version = None;
    volume.status = None;
    let content = serde_json::to_vec(&volume)?;
    if std::fs::read(record).is_ok_and(|old| old == content) {
        return Ok(());
    }
    let dir: PathBuf = record.parent().map(Path::to_owned).unwrap_or_default();
    super::make_private(&dir)?;
    crate::private_file::replace(record, &content)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;

    use futures::FutureExt as _;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn only_a_bound_claim_of_the_right_owner_can_be_used() {
        let claim = |phase: &str, more: Value| -> PersistentVolumeClaim {
            let mut claim =
                json!({"metadata": {"name": "c"}, "spec": {"volumeName": "v"}, "status": {"phase": phase}});
            for (name, value) in more.as_object().expect("fields") {
                claim["metadata"][name] = value.clone();
            }
            serde_json::from_value(claim).expect("claim")
        };
        assert_eq!(usable_volume(&claim("Bound", json!({})), None), Ok("v"));
        assert!(
            usable_volume(&claim("Pending", json!({})), None).expect_err("pending").contains("not bound")
        );
        let deleted = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        assert!(
            usable_volume(&claim("Bound", deleted), None).expect_err("deleted").contains("being deleted")
        );
        assert!(usable_volume(&claim("Bound", json!({})), Some("u")).is_err());
        let owners =
            json!([{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": true}]);
        assert_eq!(usable_volume(&claim("Bound", json!({"ownerReferences": owners})), Some("u")), Ok("v"));
    }

    #[test]
    fn mount_options_are_refused_if_they_would_be_ignored() {
        let options = |annotations: Value, options: Value| {
            let volume = json!({"metadata": {"annotations": annotations},
                "spec": {"hostPath": {"path": "/x"}, "mountOptions": options}});
            options_of(&serde_json::from_value(volume).expect("volume"))
        };
        assert!(refuse_options(&options(json!({}), json!([]))).is_ok());
        let empty = json!({"volume.beta.kubernetes.io/mount-options": ""});
        assert!(refuse_options(&options(empty, json!(null))).is_ok());
        let former = options(json!({"volume.beta.kubernetes.io/mount-options": "ro,noexec"}), json!(["rw"]));
        assert_eq!(former, ["ro", "noexec"]);
        for refused in [former, options(json!({}), json!(["ro"]))] {
            assert!(matches!(refuse_options(&refused), Err(SetUpError::NoMountOptions)));
        }
    }

    #[test]
    fn the_record_survives_and_has_no_status() {
        let dir = tempfile::tempdir().expect("directory");
        let record = dir.path().join("claims/data.json");
        let volume: PersistentVolume =
            serde_json::from_value(json!({"metadata": {"name": "v", "resourceVersion": "1"},
            "spec": {"local": {"path": "/x"}}, "status": {"phase": "Bound"}}))
            .expect("volume");
        assert!(read(&record).is_none());
        write(&record, &volume).expect("write");
        let found = read(&record).expect("record");
        assert_eq!((found.metadata.name.as_deref(), found.status.is_none()), (Some("v"), true));
    }

    #[test]
    fn a_volume_is_in_use_while_a_pod_has_its_record() {
        let dir = tempfile::tempdir().expect("directory");
        let volume: PersistentVolume =
            serde_json::from_value(json!({"metadata": {"name": "v"}})).expect("volume");
        write(&dir.path().join("uid/claims/data.json"), &volume).expect("write");
        let in_use = |volume: &str| is_in_use(dir.path(), volume);
        assert!(in_use("v").expect("read") && !in_use("w").expect("read"));
        std::fs::write(dir.path().join("uid/claims/data.tmp"), "{").expect("write");
        std::fs::create_dir(dir.path().join("other")).expect("create");
        assert!(!in_use("w").expect("a pod without claims, and a temporary file"));
        std::fs::create_dir(dir.path().join("other/claims")).expect("create");
        std::fs::write(dir.path().join("other/claims/data.json"), "{").expect("write");
        let error = in_use("w").expect_err("the record may be of this volume").to_string();
        assert!(error.contains("other/claims/data.json"), "{error}");
        assert!(in_use("v").expect("read"));
        std::fs::remove_dir_all(dir.path().join("other")).expect("remove the other pod");
        std::fs::remove_dir_all(dir.path().join("uid")).expect("remove the pod");
        assert!(!in_use("v").expect("read"));
    }

    #[test]
    fn a_local_volume_is_exclusive_if_this_is_its_only_access_mode() {
        let exclusive = |modes: &[&str], source: &str| is_exclusive(&volume_with(modes, source));
        assert!(exclusive(&["ReadWriteOncePod"], "local"));
        assert!(!exclusive(&["ReadWriteOncePod"], "hostPath"));
        assert!(!exclusive(&["ReadWriteOnce", "ReadWriteOncePod"], "local"));
        assert!(!exclusive(&["ReadWriteOnce"], "local"));
    }

    fn volume_with(modes: &[&str], source: &str) -> PersistentVolume {
        let mut volume = json!({"metadata": {"name": "v"}, "spec": {"accessModes": modes}});
        volume["spec"][source] = json!({"path": "/x"});
        serde_json::from_value(volume).expect("volume")
    }

    #[tokio::test]
    async fn a_volume_for_one_pod_is_not_recorded_for_a_second_pod() {
        let dir = tempfile::tempdir().expect("directory");
        let exclusive = volume_with(&["ReadWriteOncePod"], "local");
        let record = async |uid: &str, name: &str| {
            let at = record_of(&dir.path().join(uid), name);
            match record_volume(dir.path(), uid, &at, &exclusive).await {
                Err(SetUpError::InUse) => false,
                recorded => {
                    recorded.expect("read and write");
                    at.exists()
                }
            }
        };
        assert!(record("a", "one").await && record("a", "two").await, "two volumes of one pod");
        assert!(!record("b", "one").await);
        assert!(!dir.path().join("b").exists(), "a refused pod has no record");
        write(&record_of(&dir.path().join("c"), "one"), &exclusive).expect("a record of an earlier agent");
        assert!(record("a", "one").await && record("c", "one").await, "pods keep their volumes");
        for uid in ["a", "c"] {
            std::fs::remove_dir_all(dir.path().join(uid)).expect("remove the pod");
        }
        assert!(record("b", "one").await);
    }

    #[tokio::test]
    async fn a_cancelled_search_records_no_volume() {
        let dir = tempfile::tempdir().expect("directory");
        let exclusive = volume_with(&["ReadWriteOncePod"], "local");
        let other = record_of(&dir.path().join("other"), "one");
        crate::volume::make_private(other.parent().expect("parent")).expect("create");
        nix::unistd::mkfifo(&other, nix::sys::stat::Mode::S_IRWXU).expect("FIFO");
        let at = record_of(&dir.path().join("own"), "one");
        let mut recording = Box::pin(record_volume(dir.path(), "own", &at, &exclusive));
        // Succeeds when the search has opened the FIFO.
        let open =
            || std::fs::OpenOptions::new().write(true).custom_flags(nix::libc::O_NONBLOCK).open(&other).ok();
        let opened = async || {
            assert!(recording.as_mut().now_or_never().is_none(), "the search waits for the FIFO");
            open()
        };
        let mut fifo = coracle_testing::eventually_async("the search", 10, opened).await;
        drop(recording);
        // The other pod has another volume.
        fifo.write_all(br#"{"metadata": {"name": "w"}}"#).expect("write");
        drop(fifo);
        SEARCHES.run(|| ()).await.expect("the search has ended");
        assert!(!dir.path().join("own").exists());
    }
}
