//! Records of the images that the agent pulled, with the pull secrets that gave access to them. Without the records,
//! each pod of the node could use the private images that other pods have pulled.
//!
//! Source: `pkg/kubelet/images/pullmanager` (KEP-2535). A secret is recorded by its uid, without a digest of its
//! content. So if a pod has the same credentials in another secret, the registry verifies the pod once.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_images::Reference;
use coracle_proto::cri;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::image_verification::ImageVerification;
use crate::json_file;
use crate::runtime::Runtime;

/// Maximum secrets of a repository in a record, and maximum repositories of an image. Above the limit the oldest secret
/// or the first repository is dropped. The registry then verifies the affected pods again.
const SECRETS_MAX: usize = 100;
const REPOSITORIES_MAX: usize = 100;

/// A pull secret of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct UsedSecret {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: String,
}

/// The result of [`PullRecords::check`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Check {
    /// The pod may use the image.
    Allowed,
    /// The registry must verify the pod's credentials.
    Refused,
    /// The pod may use the image if it has one of these secrets.
    Secrets(Vec<UsedSecret>),
}

/// An image of the store that a pod wants to use.
#[derive(Clone, Copy, Debug)]
pub(super) struct ImageRequest<'a> {
    /// Its name in the pod, as written and parsed.
    pub(super) image: &'a str,
    pub(super) reference: &'a Reference,
    /// Its id in the runtime.
    pub(super) id: &'a str,
    /// All of its names in the runtime, with tags and with digests.
    pub(super) names: &'a [String],
}

/// The records of one node.
pub(crate) struct PullRecords {
    verification: ImageVerification,
    /// Directory of the records, and of the intents below it.
    dir: PathBuf,
    state: Mutex<State>,
    /// Held while a record is written.
    writing: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct State {
    /// Records, by image id.
    records: HashMap<String, CachedRecord>,
    /// Pulls without a known result, by the name of the image.
    intents: HashMap<String, Intent>,
    /// The number of the last change.
    changes: u64,
}

/// A record in memory.
#[derive(Default)]
struct CachedRecord {
    record: Record,
    /// The number of its last change.
    change: u64,
}

/// The file of a record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Record {
    /// The image's id in the runtime.
    id: String,
    /// The pods that may use the image. The key is the repository in the image name of a pod.
    repositories: BTreeMap<String, Access>,
}

/// The pods that may use an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Access {
    /// Whether all pods may use the image: it was pulled without credentials, or with the node's credentials.
    every_pod: bool,
    secrets: Vec<UsedSecret>,
}

/// The pulls of an image that have no record yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Intent {
    /// The number of running pulls.
    running: usize,
    /// Whether a pull was interrupted: the image may be in the store.
    is_open: bool,
}

/// A running pull. If it is dropped before its result is known, the agent asks the runtime whether it has the image.
pub(super) struct RunningPull {
    records: Arc<PullRecords>,
    runtime: Arc<dyn Runtime>,
    image: String,
    end: End,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Unknown,
    Failed,
    Recorded,
}

/// Ids and versions of the records at one time, for [`PullRecords::remove_absent`].
#[derive(Debug)]
pub(crate) struct Snapshot(Vec<(String, u64)>);

// === impl PullRecords ===

impl PullRecords {
    /// Reads the records of a directory, which may be absent.
    pub(crate) fn open(verification: ImageVerification, dir: PathBuf) -> Self {
        let mut state = State::default();
        for path in json_file::list(&dir) {
            if let Some(record) = json_file::read::<Record>(&path) {
                state.records.insert(record.id.clone(), CachedRecord { record, change: 0 });
            }
        }
        for image in interrupted(&dir.join("intents")) {
            state.intents.insert(image, Intent { running: 0, is_open: true });
        }
        Self { verification, dir, state: Mutex::new(state), writing: tokio::sync::Mutex::default() }
    }

    /// Resolves interrupted pulls, including pulls of earlier agents. Must be called before the other functions. If the
    /// runtime does not respond about a pull, a later call resolves it.
    pub(super) async fn settle(&self, runtime: &dyn Runtime) {
        for image in self.open_intents() {
            self.resolve(runtime, &image).await;
        }
    }

    fn open_intents(&self) -> Vec<String> {
        let state = self.state();
        let open = state.intents.iter().filter(|(_, intent)| intent.is_open);
        open.map(|(image, _)| image.clone()).collect()
    }

    /// Ends an interrupted pull. If the pull has stored the image, the image gets a record. If the runtime does not
    /// respond, the pull stays open, and the image counts as pulled.
    async fn resolve(&self, runtime: &dyn Runtime, image: &str) {
        let spec = cri::ImageSpec { image: image.to_owned(), ..cri::ImageSpec::default() };
        let request = cri::ImageStatusRequest { image: Some(spec), verbose: false };
        match runtime.image_status(request).await {
            Ok(response) => self.adopt(image, response.image.map(|image| image.id)).await,
            Err(error) => {
                let error = error.message();
                tracing::warn!(image, error, "cannot read the status of an image after an interrupted pull");
            }
        }
    }

    /// Ends an interrupted pull. The image with the given id, if any, gets a record that gives no pod access.
    async fn adopt(&self, image: &str, id: Option<String>) {
        if let Some(id) = id {
            self.change(&id, |_| {});
            if !self.write(&id).await {
                return;
            }
        }
        let mut state = self.state();
        let Some(intent) = state.intents.get_mut(image) else { return };
        intent.is_open = false;
        if intent.running == 0 {
            state.intents.remove(image);
            remove(&self.intent_path(image));
        }
    }

    /// Whether a pod may use an image of the store without a pull. While a pull of any of its names has no result, an
    /// image counts as pulled: a pod may name the image by digest or id. An image also counts as pulled if its record
    /// is unreadable.
    pub(super) fn check(&self, wanted: ImageRequest<'_>) -> Check {
        let state = self.state();
        let record = state.records.get(wanted.id).map(|known| &known.record);
        let is_pulled = record.is_some()
            || self.has_begun(&state, &wanted.reference.to_string())
            || wanted.names.iter().any(|name| self.has_begun(&state, name))
            || self.has_unread(wanted.id);
        let repository = wanted.reference.repository();
        if !self.verification.is_required(wanted.image, &repository, is_pulled) {
            return Check::Allowed;
        }
        match record.and_then(|record| record.repositories.get(&repository)) {
            Some(access) if access.every_pod => Check::Allowed,
            Some(access) if !access.secrets.is_empty() => Check::Secrets(access.secrets.clone()),
            Some(_) | None => Check::Refused,
        }
    }

    /// Records that a pull begins. The file is not synced: a journaling file system writes it before the image, which
    /// is stored later.
    ///
    /// # Errors
    /// When the file cannot be written. The image must not be pulled then.
    pub(super) fn begin(
        self: &Arc<Self>,
        runtime: &Arc<dyn Runtime>,
        reference: &str,
    ) -> io::Result<RunningPull> {
        let mut state = self.state();
        let path = self.intent_path(reference);
        if !state.intents.contains_key(reference) {
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            fs::write(&path, reference)?;
        }
        state.intents.entry(reference.to_owned()).or_default().running += 1;
        let (records, runtime) = (Arc::clone(self), Arc::clone(runtime));
        Ok(RunningPull { records, runtime, image: reference.to_owned(), end: End::Unknown })
    }

    /// Records a successful pull with the secret that gave access. None if the pull had no credentials, or the
    /// credentials of the node.
    pub(super) async fn pulled(
        &self,
        pull: RunningPull,
        id: &str,
        repository: &str,
        secret: Option<UsedSecret>,
    ) {
        let is_changed = self.change(id, |record| record.add(repository, secret));
        if !is_changed || self.write(id).await {
            pull.ended(End::Recorded);
        }
    }

    /// Takes a snapshot of the records.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let state = self.state();
        Snapshot(state.records.iter().map(|(id, known)| (id.clone(), known.change)).collect())
    }

    /// Removes the records of a snapshot that have not changed since, and whose images the runtime did not have after
    /// the snapshot.
    pub(crate) fn remove_absent(&self, snapshot: Snapshot, is_present: impl Fn(&str) -> bool) {
        for (id, change) in snapshot.0.into_iter().filter(|(id, _)| !is_present(id)) {
            let mut state = self.state();
            if state.records.get(&id).is_some_and(|known| known.change == change) {
                state.records.remove(&id);
                remove(&self.path(&id));
            }
        }
    }

    /// Changes or creates the record of an image. Returns whether its content is new.
    fn change(&self, id: &str, change: impl FnOnce(&mut Record)) -> bool {
        let mut state = self.state();
        state.changes += 1;
        let number = state.changes;
        let is_new = !state.records.contains_key(id);
        let known = state.records.entry(id.to_owned()).or_default();
        let before = known.record.clone();
        known.record.id = id.to_owned();
        known.change = number;
        change(&mut known.record);
        is_new || known.record != before
    }

    /// Writes the record of an image. Returns whether it is on disk; a failure is logged.
    async fn write(&self, id: &str) -> bool {
        let _one_at_a_time = self.writing.lock().await;
        let Some(record) = self.state().records.get(id).map(|known| known.record.clone()) else {
            return true;
        };
        let path = self.path(id);
        let written = coracle_threads::spawn_blocking(move || {
            json_file::write(&path, &record).inspect(|()| remove(&path.with_extension("bad")))
        });
        let written = written.await.unwrap_or_else(|error| Err(io::Error::other(error)));
        if let Err(error) = &written {
            tracing::warn!(id, %error, "cannot record the pull of an image");
        }
        written.is_ok()
    }

    /// Whether an image has a record that is damaged, or that could not be read at the start.
    fn has_unread(&self, id: &str) -> bool {
        let path = self.path(id);
        may_exist(&path) || may_exist(&path.with_extension("bad"))
    }

    /// Whether a pull of this name has begun and has no result. A file of such a pull counts even if it is unreadable
    /// or was emptied by a power failure.
    fn has_begun(&self, state: &State, name: &str) -> bool {
        state.intents.contains_key(name) || may_exist(&self.intent_path(name))
    }

    fn path(&self, id: &str) -> PathBuf {
        self.dir.join(format!("{}.json", digest(id)))
    }

    fn intent_path(&self, image: &str) -> PathBuf {
        self.dir.join("intents").join(digest(image))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The names of images whose pulls were interrupted. A file that a power failure has truncated is ignored, and stays
/// until the image is pulled again.
fn interrupted(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.filter_map(|path| fs::read_to_string(path).ok()).filter(|name| !name.is_empty()).collect()
}

/// Whether a file may exist. Only ENOENT shows that the file does not exist.
fn may_exist(path: &Path) -> bool {
    !matches!(path.symlink_metadata(), Err(error) if error.kind() == ErrorKind::NotFound)
}

fn remove(path: &Path) {
    if let Err(error) = coracle_tree::remove_file(path) {
        tracing::warn!(%error, path = %path.display(), "cannot remove a record of a pull");
    }
}

/// A file name for a text of any length.
fn digest(text: &str) -> String {
    hex::encode(Sha256::digest(text.as_bytes()))
}

// === impl Record ===

impl Record {
    /// Adds the access that a successful pull has proved.
    fn add(&mut self, repository: &str, secret: Option<UsedSecret>) {
        if !self.repositories.contains_key(repository) && self.repositories.len() >= REPOSITORIES_MAX {
            self.repositories.pop_first();
        }
        self.repositories.entry(repository.to_owned()).or_default().add(secret);
    }
}

// === impl Access ===

impl Access {
    fn add(&mut self, secret: Option<UsedSecret>) {
        match secret {
            None => *self = Self { every_pod: true, secrets: Vec::new() },
            Some(secret) if !self.every_pod && !self.secrets.contains(&secret) => {
                if self.secrets.len() >= SECRETS_MAX {
                    self.secrets.remove(0);
                }
                self.secrets.push(secret);
            }
            Some(_) => {}
        }
    }
}

// === impl RunningPull ===

impl RunningPull {
    /// The pull has failed: the store has no new image.
    pub(super) fn failed(self) {
        self.ended(End::Failed);
    }

    fn ended(mut self, end: End) {
        self.end = end;
    }
}

impl Drop for RunningPull {
    fn drop(&mut self) {
        let mut state = self.records.state();
        let Some(intent) = state.intents.get_mut(&self.image) else { return };
        intent.running = intent.running.saturating_sub(1);
        intent.is_open |= self.end == End::Unknown;
        if intent.running == 0 && (self.end == End::Recorded || !intent.is_open) {
            state.intents.remove(&self.image);
            remove(&self.records.intent_path(&self.image));
        }
        drop(state);
        // Usually the pod was deleted: then the runtime cancels the pull, unless the pull has just completed. Otherwise
        // the record could not be written.
        if self.end == End::Unknown
            && let Ok(tasks) = tokio::runtime::Handle::try_current()
        {
            let (records, runtime) = (Arc::clone(&self.records), Arc::clone(&self.runtime));
            let image = std::mem::take(&mut self.image);
            tasks.spawn(async move { records.resolve(&*runtime, &image).await });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::Remote;

    fn open(dir: &Path) -> Arc<PullRecords> {
        Arc::new(PullRecords::open(ImageVerification::default(), dir.join("image-pulls")))
    }

    fn begin(records: &Arc<PullRecords>) -> RunningPull {
        // Nothing listens on this port, so interrupted pulls are not resolved.
        let nowhere = tonic::transport::Endpoint::from_static("http://127.0.0.1:1").connect_lazy();
        let runtime: Arc<dyn Runtime> = Arc::new(Remote::new(nowhere));
        records.begin(&runtime, "r.io/a:1").unwrap()
    }

    fn secret(uid: &str) -> UsedSecret {
        UsedSecret { namespace: "ns".to_owned(), name: "pull".to_owned(), uid: uid.to_owned() }
    }

    fn check(records: &PullRecords, id: &str) -> Check {
        check_as(records, "r.io/a:1", id, &[])
    }

    /// The result for a pod that uses another name of the image.
    fn check_as(records: &PullRecords, image: &str, id: &str, names: &[String]) -> Check {
        let reference = Reference::parse(image).unwrap();
        records.check(ImageRequest { image, reference: &reference, id, names })
    }

    async fn pull(records: &Arc<PullRecords>, id: &str, secret: Option<UsedSecret>) {
        records.pulled(begin(records), id, "r.io/a", secret).await;
    }

    #[tokio::test]
    async fn an_image_that_was_pulled_with_a_secret_is_only_for_pods_with_a_recorded_secret() {
        let dir = tempfile::tempdir().unwrap();
        let records = open(dir.path());
        assert_eq!(check(&records, "preloaded"), Check::Allowed);
        pull(&records, "private", Some(secret("1"))).await;
        pull(&records, "private", Some(secret("2"))).await;
        pull(&records, "public", None).await;
        let again = open(dir.path());
        for records in [records, again] {
            assert_eq!(check(&records, "private"), Check::Secrets(vec![secret("1"), secret("2")]));
            assert_eq!(check(&records, "public"), Check::Allowed);
            assert_eq!(check_as(&records, "s.io/b", "private", &[]), Check::Refused, "another name");
        }
        assert!(interrupted(&dir.path().join("image-pulls/intents")).is_empty());
    }

    #[tokio::test]
    async fn an_image_is_for_all_pods_once_it_was_pulled_without_a_secret() {
        let dir = tempfile::tempdir().unwrap();
        let records = open(dir.path());
        for used in [Some(secret("1")), None, Some(secret("2"))] {
            pull(&records, "i", used).await;
        }
        assert_eq!(check(&records, "i"), Check::Allowed);
        assert!(!records.change("i", |record| record.add("r.io/a", None)), "not written again");
    }

    #[tokio::test]
    async fn an_interrupted_pull_counts_as_a_pull_and_a_failed_one_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let records = open(dir.path());
        begin(&records).failed();
        assert_eq!(check(&records, "i"), Check::Allowed);
        drop(begin(&records));
        assert_eq!(check(&records, "i"), Check::Refused);
        begin(&records).failed();
        assert_eq!(
            check(&records, "i"),
            Check::Refused,
            "the first one may have put the image into the store"
        );
        let again = open(dir.path());
        again.adopt("r.io/a:1", Some("i".to_owned())).await;
        assert_eq!(check(&again, "i"), Check::Refused);
        assert_eq!(check(&again, "other"), Check::Allowed, "the intent is replaced by the record");
        assert_eq!(check(&open(dir.path()), "i"), Check::Refused);
    }

    #[tokio::test]
    async fn an_image_whose_pull_has_no_result_is_not_preloaded_by_its_other_names() {
        let dir = tempfile::tempdir().unwrap();
        let records = open(dir.path());
        let (id, names) = ("0123abcd0123", ["r.io/a:1".to_owned()]);
        let running = begin(&records);
        for image in [id, "r.io/a:2", "s.io/b"] {
            assert_eq!(check_as(&records, image, id, &names), Check::Refused, "{image}");
            assert_eq!(check_as(&records, image, id, &[]), Check::Allowed, "{image}");
        }
        drop(running);
        assert_eq!(check_as(&records, id, id, &names), Check::Refused, "it was interrupted");
        assert_eq!(records.open_intents(), names, "resolved later");
        records.adopt("r.io/a:1", None).await;
        assert_eq!(check_as(&records, id, id, &names), Check::Allowed);
        assert!(records.open_intents().is_empty());
    }

    #[tokio::test]
    async fn an_interrupted_pull_without_an_image_in_the_store_counts_as_none() {
        let dir = tempfile::tempdir().unwrap();
        let records = open(dir.path());
        drop(begin(&records));
        let running = begin(&records);
        records.adopt("r.io/a:1", None).await;
        assert_eq!(check(&records, "i"), Check::Refused, "another pull runs");
        running.failed();
        assert_eq!(check(&records, "i"), Check::Allowed);
        assert!(interrupted(&dir.path().join("image-pulls/intents")).is_empty());
    }

    #[tokio::test]
    async fn a_damaged_record_still_says_that_the_image_was_pulled() {
        let dir = tempfile::tempdir().unwrap();
        let records = open(dir.path());
        pull(&records, "i", None).await;
        fs::write(records.path("i"), "{").unwrap();
        let again = open(dir.path());
        assert_eq!(check(&again, "i"), Check::Refused);
        pull(&again, "i", None).await;
        assert!(!records.path("i").with_extension("bad").exists(), "replaced");
    }

    #[tokio::test]
    async fn files_that_could_not_be_read_at_the_start_say_that_the_image_was_pulled() {
        let dir = tempfile::tempdir().unwrap();
        let records = open(dir.path());
        pull(&open(dir.path()), "i", Some(secret("1"))).await;
        assert_eq!(check(&records, "i"), Check::Refused, "its access is not known");
        assert_eq!(check(&records, "other"), Check::Allowed);
        fs::write(records.intent_path("r.io/a:1"), "").unwrap();
        let again = open(dir.path());
        assert_eq!(check(&again, "other"), Check::Refused, "the pull may have put it into the store");
        begin(&again).failed();
        assert_eq!(check(&again, "other"), Check::Allowed);
    }

    #[tokio::test]
    async fn records_of_absent_images_are_removed_unless_they_are_newer() {
        let dir = tempfile::tempdir().unwrap();
        let records = open(dir.path());
        pull(&records, "gone", Some(secret("1"))).await;
        pull(&records, "back", Some(secret("1"))).await;
        let snapshot = records.snapshot();
        pull(&records, "back", Some(secret("1"))).await;
        records.remove_absent(snapshot, |_| false);
        for records in [&records, &open(dir.path())] {
            assert_eq!(check(records, "gone"), Check::Allowed);
            assert_eq!(check(records, "back"), Check::Secrets(vec![secret("1")]));
        }
    }

    #[test]
    fn a_record_is_limited() {
        let mut record = Record::default();
        (0..=SECRETS_MAX).for_each(|number| record.add("r/a", Some(secret(&number.to_string()))));
        let secrets = &record.repositories["r/a"].secrets;
        assert_eq!((secrets.len(), &secrets[0]), (SECRETS_MAX, &secret("1")));
        (0..=REPOSITORIES_MAX).for_each(|number| record.add(&format!("s/{number}"), None));
        assert_eq!(record.repositories.len(), REPOSITORIES_MAX);
    }
}
