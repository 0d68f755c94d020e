//! Key management services, version 2: a plugin on a unix socket encrypts the seed from which the keys of values are
//! derived.
//!
//! A new seed is made at the start and after each rotation of the plugin's key. The plugin is called once to encrypt a
//! seed, and once to decrypt each unknown seed of a stored value. Each value has its own key: HKDF-SHA256 of the seed
//! and 32 random bytes.
//!
//! A thread with its own runtime calls the plugin, because values are encrypted and decrypted in synchronous code.
//! Calls run concurrently. While an async worker waits for a call, another worker runs its other tasks.

mod checks;
mod client;
mod source;

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering, mpsc},
    time::Duration,
};

use arc_swap::ArcSwap;
use coracle_threads::off_worker;
use prost::Message as _;
use tokio::sync::{Semaphore, mpsc::UnboundedReceiver, mpsc::UnboundedSender, mpsc::unbounded_channel};

use super::gcm::{self, random};
use checks::{Checks, Failure};
use client::Client;
use coracle_sealing::Error;
use source::{Decrypted, Source};

#[allow(
    clippy::all,
    clippy::pedantic,
    missing_docs,
    unreachable_pub,
    reason = "generated; proto/kms.proto carries the meaning"
)]
mod v2 {
    tonic::include_proto!("v2");
}

/// Bytes of a seed.
const SEED_BYTES: usize = 32;
/// Number of random bytes of each value. The key of a value is derived from these bytes and the seed.
const INFO_BYTES: usize = 32;
/// Maximum number of cached seeds.
const MAX_CACHED_SEEDS: usize = 1000;
/// Maximum number of callers that wait for decryptions, and of callers that wait for a check. Each caller occupies a
/// thread. Further callers get an error at once.
const MAX_WAITING: usize = 8;
/// Interval of key checks. The first write after the interval requests the plugin's key id, in the background.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// Interval of key checks after a failed check.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// Duration of failed checks after which no value is encrypted, as upstream. The key may have been revoked meanwhile.
const MAX_FAILING: Duration = Duration::from_secs(180);
/// Maximum bytes of the key id in a response, as upstream.
const MAX_KEY_ID: usize = 1 << 10;
/// Maximum bytes of an encrypted seed, as upstream.
const MAX_SOURCE: usize = 1 << 10;
/// Maximum bytes of all annotations of an encrypted seed, as upstream.
const MAX_ANNOTATIONS: usize = 32 << 10;

/// The settings of a plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KmsSettings {
    pub(super) name: String,
    pub(super) socket: PathBuf,
    pub(super) timeout: Duration,
}

/// A plugin.
pub(super) struct Kms {
    settings: KmsSettings,
    prefix: Vec<u8>,
    shared: Arc<Shared>,
    calls: UnboundedSender<Call>,
    /// Permits of callers that wait for decryptions.
    waiting: Semaphore,
    /// Permits of callers that wait for a check. These callers are writes. If they took the permits of reads, a watch
    /// could fail to decrypt a change, and would skip it.
    checking: Semaphore,
}

/// An encrypted seed or key. It is the key of the cache.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Encrypted {
    is_seed: bool,
    bytes: Vec<u8>,
}

/// Cache of decrypted seeds and keys.
type Sources = HashMap<Encrypted, Arc<Decrypted>>;
/// The channel to a caller that waits for the result of a decryption.
type Caller = mpsc::Sender<Result<Arc<Decrypted>, String>>;

struct Shared {
    current: ArcSwap<Option<Current>>,
    /// Decryptions that wait for the plugin's response, with their callers.
    running: Mutex<HashMap<Encrypted, Vec<Caller>>>,
    /// Lock that allows one check of the plugin's key at a time.
    renewing: tokio::sync::Mutex<()>,
    checks: Mutex<Checks>,
    seeds: Mutex<Sources>,
}

/// The seed for new values.
struct Current {
    key_id: String,
    encrypted: Vec<u8>,
    annotations: HashMap<String, Vec<u8>>,
    seed: Arc<Decrypted>,
}

/// A message to the thread.
enum Call {
    /// Makes a new seed if the plugin has another key.
    Check(Option<mpsc::Sender<Result<(), String>>>),
    Decrypt(Encrypted, v2::DecryptRequest, Caller),
}

// === impl Kms ===

impl Kms {
    /// Starts the thread, and makes the first seed. If the plugin does not respond or is not healthy, values cannot be
    /// encrypted until a later check succeeds. As upstream, this is no error: the plugin may start later.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(settings: KmsSettings) -> Result<Self, Error> {
        let shared = Arc::new(Shared {
            current: ArcSwap::default(),
            running: Mutex::default(),
            renewing: tokio::sync::Mutex::default(),
            checks: Mutex::new(Checks::running()),
            seeds: Mutex::default(),
        });
        let (calls, queue) = unbounded_channel();
        let (of_thread, of_client) = (shared.clone(), settings.clone());
        let started = std::thread::Builder::new()
            .name("kms".to_owned())
            .spawn(move || serve(&of_thread, of_client, queue));
        started.map_err(|error| failed(&settings, error.to_string()))?;
        let prefix = prefix_of(&settings.name);
        let [waiting, checking] = [(); 2].map(|()| Semaphore::new(MAX_WAITING));
        let kms = Self { settings, prefix, shared, calls, waiting, checking };
        let (done, checked) = mpsc::channel();
        kms.call(Call::Check(Some(done)))?;
        // The wait needs no timeout: the thread limits the duration of the call.
        let outcome = off_worker(|| checked.recv());
        let outcome = outcome.map_err(|_ended| failed(&kms.settings, "its thread has ended".to_owned()))?;
        if let Err(reason) = outcome {
            let name = &kms.settings.name;
            tracing::warn!(name, reason, "a key management service failed; its key cannot encrypt yet");
        }
        Ok(kms)
    }

    pub(super) fn settings(&self) -> &KmsSettings {
        &self.settings
    }

    pub(super) fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    pub(super) fn seal(&self, plain: &[u8], context: &[u8]) -> Result<Vec<u8>, Error> {
        self.check_if_due();
        self.check_usable()?;
        let current = self.shared.current.load();
        let current = current.as_ref().as_ref().ok_or(Error::Cipher)?;
        let info: [u8; INFO_BYTES] = random()?;
        let key = current.seed.source.key(&info).ok_or(Error::Cipher)?;
        let mut data = info.to_vec();
        data.extend(gcm::seal(&key, plain, context)?);
        let object = v2::EncryptedObject {
            encrypted_data: data,
            key_id: current.key_id.clone(),
            encrypted_dek_source: current.encrypted.clone(),
            annotations: current.annotations.clone(),
            encrypted_dek_source_type: v2::EncryptedDekSourceType::HkdfSha256XnonceAesGcmSeed.into(),
        };
        let mut sealed = self.prefix.clone();
        sealed.extend(object.encode_to_vec());
        Ok(sealed)
    }

    /// Decrypts the bytes after the prefix.
    pub(super) fn open(&self, sealed: &[u8], context: &[u8]) -> Result<Vec<u8>, Error> {
        let damaged = || Error::Damaged { id: self.settings.name.clone() };
        let object = v2::EncryptedObject::decode(sealed).map_err(|_invalid| damaged())?;
        let (encrypted, data) = (Encrypted::of(&object), object.encrypted_data.clone());
        let decrypted = self.source(&encrypted, object)?;
        let opened = match &decrypted.source {
            Source::Key(key) => gcm::open(key, &data, context),
            Source::Seed(_) => data
                .split_first_chunk::<INFO_BYTES>()
                .and_then(|(info, text)| gcm::open(&decrypted.source.key(info)?, text, context)),
        };
        if opened.is_some() {
            decrypted.is_proven.store(true, Ordering::Relaxed);
        } else if !decrypted.is_proven.load(Ordering::Relaxed) {
            // The plugin may respond correctly to the next request.
            self.shared.seeds().remove(&encrypted);
        }
        opened.ok_or_else(damaged)
    }

    /// Whether the seed or key of a stored value is in the cache, so that the plugin is not called for this value.
    pub(super) fn has_key_of(&self, stored: &[u8]) -> bool {
        let sealed = stored.strip_prefix(self.prefix());
        let object = sealed.and_then(|sealed| v2::EncryptedObject::decode(sealed).ok());
        object.is_some_and(|object| self.shared.seeds().contains_key(&Encrypted::of(&object)))
    }

    /// Whether the value is protected by the current key of the plugin.
    pub(super) fn is_current(&self, sealed: &[u8]) -> bool {
        let current = self.shared.current.load();
        let object = v2::EncryptedObject::decode(sealed);
        current
            .as_ref()
            .as_ref()
            .zip(object.ok())
            .is_some_and(|(current, object)| current.key_id == object.key_id)
    }

    /// The seed or key of a value. If it is not in the cache, the plugin decrypts it.
    fn source(&self, encrypted: &Encrypted, object: v2::EncryptedObject) -> Result<Arc<Decrypted>, Error> {
        if let Some(known) = self.shared.seeds().get(encrypted) {
            return Ok(known.clone());
        }
        let request = v2::DecryptRequest {
            ciphertext: object.encrypted_dek_source,
            uid: String::new(),
            key_id: object.key_id,
            annotations: object.annotations,
        };
        let many = |_full| failed(&self.settings, format!("{MAX_WAITING} requests wait for its response"));
        let _permit = self.waiting.try_acquire().map_err(many)?;
        let (done, decrypted) = mpsc::channel();
        self.call(Call::Decrypt(encrypted.clone(), request, done))?;
        // The wait needs no timeout: the thread limits the duration of the call.
        let source = off_worker(|| decrypted.recv());
        let source = source.unwrap_or_else(|_ended| Err("its thread has ended".to_owned()));
        source.map_err(|reason| failed(&self.settings, reason))
    }

    /// The result of the last check. Starts the next check if it is due. After a failure the call waits for that check.
    /// The failure may be old, because without requests there are no checks.
    ///
    /// # Errors
    /// The reason of the failure.
    pub(super) fn health(&self) -> Result<(), Error> {
        let has_failed = self.shared.checks().failure.is_some();
        // Only one caller waits, so health checks do not take the permits of requests.
        if self.check_if_due() && has_failed {
            self.wait_for_check();
        }
        match &self.shared.checks().failure {
            Some(failure) => Err(failed(&self.settings, failure.reason.clone())),
            None => Ok(()),
        }
    }

    /// Checks that values can be encrypted. If they cannot, starts a check of the plugin's key if a check is due, and
    /// waits for the running check. So the first requests after a time without requests do not fail because of an
    /// outdated failure.
    ///
    /// # Errors
    /// The plugin has had no key yet, or its key has expired.
    pub(super) fn ready(&self) -> Result<(), Error> {
        if self.check_usable().is_err() {
            self.check_if_due();
            self.wait_for_check();
        }
        self.check_usable()
    }

    /// Starts a check of the plugin's key if a check is due. Does not wait. Returns whether this call started the
    /// check.
    fn check_if_due(&self) -> bool {
        let is_due = self.shared.checks().begin_if_due();
        if is_due && self.calls.send(Call::Check(None)).is_err() {
            self.shared.checks().record(&Err("its thread has ended".to_owned()));
        }
        is_due
    }

    /// Waits for the end of the running check. Returns at once if no check runs, or if too many callers wait for the
    /// check.
    fn wait_for_check(&self) {
        let Ok(_permit) = self.checking.try_acquire() else { return };
        let Some(ended) = self.shared.checks().join() else { return };
        // The wait needs no timeout: the thread limits the duration of the call. No message is sent: the result is an
        // error when the sender is dropped.
        let _ = off_worker(|| ended.recv());
    }

    /// Checks that there is a key, and that it may still encrypt.
    fn check_usable(&self) -> Result<(), Error> {
        let has_key = self.shared.current.load().is_some();
        match &self.shared.checks().failure {
            Some(Failure { reason, .. }) if !has_key => Err(failed(&self.settings, reason.clone())),
            Some(Failure { since, reason }) if since.elapsed() > MAX_FAILING => {
                Err(failed(&self.settings, format!("the current key has expired: {reason}")))
            }
            _ => Ok(()),
        }
    }

    fn call(&self, call: Call) -> Result<(), Error> {
        let sent = self.calls.send(call);
        sent.map_err(|_ended| failed(&self.settings, "its thread has ended".to_owned()))
    }
}

/// Prefix of the values that the plugin with this name encrypts. A name contains no colon.
pub(super) fn prefix_of(name: &str) -> Vec<u8> {
    format!("k8s:enc:kms:v2:{name}:").into_bytes()
}

fn failed(settings: &KmsSettings, reason: String) -> Error {
    Error::Kms { name: settings.name.clone(), reason }
}

/// Handles messages until the last sender is dropped.
fn serve(shared: &Arc<Shared>, settings: KmsSettings, mut queue: UnboundedReceiver<Call>) {
    let name = settings.name.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            return tracing::error!(%error, name, "cannot start the runtime of a key management service");
        }
    };
    runtime.block_on(async {
        let client = Client::new(settings);
        while let Some(call) = queue.recv().await {
            match call {
                Call::Check(done) => {
                    let (shared, client) = (shared.clone(), client.clone());
                    tokio::spawn(async move { check(&shared, &client, done).await });
                }
                Call::Decrypt(encrypted, request, caller) => {
                    decrypt(shared, &client, encrypted, request, caller);
                }
            }
        }
    });
}

async fn check(shared: &Shared, client: &Client, done: Option<mpsc::Sender<Result<(), String>>>) {
    // If the plugin responds slower than checks are due, waiting checks would accumulate.
    if done.is_none() && shared.renewing.try_lock().is_err() {
        return;
    }
    let outcome = renew(shared, client).await;
    shared.checks().record(&outcome);
    match (done, outcome) {
        (Some(done), outcome) => drop(done.send(outcome)),
        (None, Err(reason)) => {
            tracing::warn!(
                name = client.name(),
                reason,
                "a key management service failed; keeping the current key"
            );
        }
        (None, Ok(())) => {}
    }
}

/// Starts a decryption. If the same bytes are being decrypted, adds the caller to that decryption.
fn decrypt(
    shared: &Arc<Shared>,
    client: &Client,
    encrypted: Encrypted,
    request: v2::DecryptRequest,
    caller: Caller,
) {
    if let Some(callers) = shared.running().get_mut(&encrypted) {
        callers.push(caller);
        return;
    }
    shared.running().insert(encrypted.clone(), vec![caller]);
    let (shared, client) = (shared.clone(), client.clone());
    tokio::spawn(async move {
        let known = shared.seeds().get(&encrypted).cloned();
        let source = match known {
            Some(known) => Ok(known),
            None => client.decrypt(request).await.and_then(|plain| {
                let source = Source::of(&plain, encrypted.is_seed).map(Decrypted::new);
                source.ok_or_else(|| "the decrypted key has a wrong size".to_owned())
            }),
        };
        if let Ok(source) = &source {
            shared.keep(encrypted.clone(), source.clone());
        }
        for caller in shared.running().remove(&encrypted).into_iter().flatten() {
            // Sending fails if the caller no longer waits. This is not an error.
            let _ = caller.send(source.clone());
        }
    });
}

/// Makes a new seed, unless the plugin still has the key of the current seed.
async fn renew(shared: &Shared, client: &Client) -> Result<(), String> {
    let _guard = shared.renewing.lock().await;
    let key_id = client.status().await?;
    let is_current =
        |current: &Option<Current>| current.as_ref().is_some_and(|current| current.key_id == key_id);
    if is_current(&shared.current.load_full()) {
        return Ok(());
    }
    let seed: [u8; SEED_BYTES] = random().map_err(|error| error.to_string())?;
    let response = client.encrypt(seed.to_vec()).await?;
    let seed = Decrypted::new(Source::of(&seed, true).ok_or("a seed has a wrong size")?);
    let encrypted = Encrypted { is_seed: true, bytes: response.ciphertext.clone() };
    shared.keep(encrypted, seed.clone());
    let next = Current {
        key_id: response.key_id,
        encrypted: response.ciphertext,
        annotations: response.annotations,
        seed,
    };
    shared.current.store(Arc::new(Some(next)));
    Ok(())
}

// === impl Shared ===

impl Shared {
    fn seeds(&self) -> std::sync::MutexGuard<'_, Sources> {
        self.seeds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn checks(&self) -> std::sync::MutexGuard<'_, Checks> {
        self.checks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self) -> std::sync::MutexGuard<'_, HashMap<Encrypted, Vec<Caller>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, encrypted: Encrypted, source: Arc<Decrypted>) {
        let mut seeds = self.seeds();
        if seeds.len() >= MAX_CACHED_SEEDS {
            seeds.clear();
        }
        seeds.insert(encrypted, source);
    }
}

// === impl Encrypted ===

impl Encrypted {
    /// The encrypted seed or key of a value.
    fn of(object: &v2::EncryptedObject) -> Self {
        let seed = i32::from(v2::EncryptedDekSourceType::HkdfSha256XnonceAesGcmSeed);
        Self { is_seed: object.encrypted_dek_source_type == seed, bytes: object.encrypted_dek_source.clone() }
    }
}

#[cfg(test)]
pub(super) mod tests;
