//! A plugin in this process, on a unix socket.

use std::{path::Path, sync::Arc, sync::Mutex, time::Instant};

use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

use super::{
    v2::key_management_service_server::{KeyManagementService, KeyManagementServiceServer},
    *,
};

/// Behaviour of the plugin. Tests change it.
#[derive(Default)]
pub(crate) struct Behaviour {
    pub(crate) key_id: String,
    pub(crate) health: String,
    pub(crate) decrypts: usize,
    /// Number of requests for the key id.
    pub(crate) statuses: usize,
    /// Whether decryptions get no answer.
    pub(crate) hangs: watch::Sender<bool>,
    /// Whether decryptions get another key of the right size.
    pub(crate) is_wrong: bool,
    pub(crate) waiting: usize,
}

struct Plugin(Arc<Mutex<Behaviour>>);

/// A cipher that is used only in tests.
fn flip(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().map(|byte| byte ^ 0xff).collect()
}

#[tonic::async_trait]
impl KeyManagementService for Plugin {
    async fn status(&self, _: Request<v2::StatusRequest>) -> Result<Response<v2::StatusResponse>, Status> {
        let mut behaviour = self.0.lock().unwrap();
        behaviour.statuses += 1;
        let (key_id, healthz) = (behaviour.key_id.clone(), behaviour.health.clone());
        Ok(Response::new(v2::StatusResponse { version: "v2".to_owned(), healthz, key_id }))
    }

    async fn encrypt(
        &self,
        request: Request<v2::EncryptRequest>,
    ) -> Result<Response<v2::EncryptResponse>, Status> {
        let key_id = self.0.lock().unwrap().key_id.clone();
        let ciphertext = flip(&request.into_inner().plaintext);
        let annotations = HashMap::from([("a.example".to_owned(), b"b".to_vec())]);
        Ok(Response::new(v2::EncryptResponse { ciphertext, key_id, annotations }))
    }

    async fn decrypt(
        &self,
        request: Request<v2::DecryptRequest>,
    ) -> Result<Response<v2::DecryptResponse>, Status> {
        let request = request.into_inner();
        if request.annotations.get("a.example").is_none_or(|value| value != b"b") {
            return Err(Status::invalid_argument("the annotations are missing"));
        }
        self.0.lock().unwrap().waiting += 1;
        let mut hangs = self.0.lock().unwrap().hangs.subscribe();
        // The sender lives as long as this service.
        drop(hangs.wait_for(|hangs| !*hangs).await);
        let mut behaviour = self.0.lock().unwrap();
        behaviour.decrypts += 1;
        let mut plaintext = flip(&request.ciphertext);
        if behaviour.is_wrong {
            plaintext.reverse();
        }
        Ok(Response::new(v2::DecryptResponse { plaintext }))
    }
}

/// Starts a plugin, which ends with the process.
pub(crate) fn plugin(socket: &Path) -> Arc<Mutex<Behaviour>> {
    let behaviour = Arc::new(Mutex::new(Behaviour {
        key_id: "1".to_owned(),
        health: "ok".to_owned(),
        ..Behaviour::default()
    }));
    let (service, listener) =
        (Plugin(behaviour.clone()), std::os::unix::net::UnixListener::bind(socket).unwrap());
    listener.set_nonblocking(true).unwrap();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let incoming = UnixListenerStream::new(UnixListener::from_std(listener).unwrap());
            let server =
                tonic::transport::Server::builder().add_service(KeyManagementServiceServer::new(service));
            server.serve_with_incoming(incoming).await.unwrap();
        });
    });
    behaviour
}

fn start(socket: &Path) -> Result<Kms, Error> {
    Kms::start(KmsSettings {
        name: "plugin".to_owned(),
        socket: socket.to_owned(),
        timeout: Duration::from_secs(60),
    })
}

#[test]
fn seeds_are_decrypted_once_and_keys_rotate() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kms.sock");
    let behaviour = plugin(&socket);
    let kms = start(&socket).unwrap();
    let values: Vec<Vec<u8>> = (0..5).map(|_| kms.seal(b"value", b"name").unwrap()).collect();
    assert_ne!(values[0], values[1]);
    // After a restart there is another seed. Values of the previous seed are still readable.
    let kms = start(&socket).unwrap();
    for value in &values {
        let sealed = value.strip_prefix(kms.prefix()).unwrap();
        assert_eq!(kms.open(sealed, b"name").unwrap(), b"value");
        assert!(kms.open(sealed, b"other").is_err());
        assert!(kms.is_current(sealed));
    }
    assert_eq!(behaviour.lock().unwrap().decrypts, 1);
    behaviour.lock().unwrap().key_id = "2".to_owned();
    let (done, checked) = mpsc::channel();
    kms.call(Call::Check(Some(done))).unwrap();
    checked.recv().unwrap().unwrap();
    let old = values[0].strip_prefix(kms.prefix()).unwrap();
    let new = kms.seal(b"value", b"name").unwrap();
    assert!(!kms.is_current(old) && kms.is_current(new.strip_prefix(kms.prefix()).unwrap()));
    assert_eq!(kms.open(old, b"name").unwrap(), b"value");
}

/// Makes the next check due.
fn make_due(kms: &Kms) {
    let long_ago = Instant::now().checked_sub(CHECK_INTERVAL * 2).unwrap();
    kms.shared.checks().requested = long_ago;
}

#[test]
fn a_plugin_that_is_absent_or_unhealthy_at_the_start_may_recover() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kms.sock");
    let kms = start(&socket).unwrap();
    assert!(matches!(kms.seal(b"value", b"name"), Err(Error::Kms { .. })));
    assert!(kms.health().is_err() && kms.ready().is_err());
    let behaviour = plugin(&socket);
    for (health, key_id, error) in
        [("broken", "1".to_owned(), "not healthy"), ("ok", "x".repeat(MAX_KEY_ID + 1), "the id of its key")]
    {
        let mut behaviour = behaviour.lock().unwrap();
        (behaviour.health, behaviour.key_id) = (health.to_owned(), key_id);
        drop(behaviour);
        make_due(&kms);
        assert!(kms.ready().unwrap_err().to_string().contains(error));
        assert!(start(&socket).unwrap().health().unwrap_err().to_string().contains(error));
    }
    behaviour.lock().unwrap().key_id = "1".to_owned();
    assert!(kms.ready().is_err(), "no check is due");
    make_due(&kms);
    kms.ready().unwrap();
    kms.health().unwrap();
    let sealed = kms.seal(b"value", b"name").unwrap();
    assert_eq!(kms.open(&sealed[kms.prefix().len()..], b"name").unwrap(), b"value");
}

#[test]
fn a_service_that_fails_is_unhealthy_and_its_key_expires() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kms.sock");
    let behaviour = plugin(&socket);
    let kms = start(&socket).unwrap();
    let check = |health: &str| {
        behaviour.lock().unwrap().health = health.to_owned();
        let (done, checked) = mpsc::channel();
        kms.call(Call::Check(Some(done))).unwrap();
        checked.recv().unwrap().is_ok()
    };
    kms.health().unwrap();
    let sealed = kms.seal(b"value", b"name").unwrap();
    assert!(!check("broken"));
    assert!(kms.health().unwrap_err().to_string().contains("not healthy"));
    // The key is used for some time, which further failures do not extend.
    kms.seal(b"value", b"name").unwrap();
    let long_ago = Instant::now().checked_sub(MAX_FAILING + Duration::from_secs(1)).unwrap();
    kms.shared.checks().failure.as_mut().unwrap().since = long_ago;
    assert!(!check("broken"));
    assert!(kms.seal(b"value", b"name").unwrap_err().to_string().contains("has expired"));
    let sealed = sealed.strip_prefix(kms.prefix()).unwrap();
    assert_eq!(kms.open(sealed, b"name").unwrap(), b"value");
    assert!(kms.ready().is_err());
    // The first request after the retry interval gets the result of a new check.
    behaviour.lock().unwrap().health = "ok".to_owned();
    make_due(&kms);
    kms.ready().unwrap();
    kms.seal(b"value", b"name").unwrap();
    assert!(!check("broken"));
    behaviour.lock().unwrap().health = "ok".to_owned();
    make_due(&kms);
    kms.health().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn writes_during_the_check_after_a_failure_wait_for_its_result() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kms.sock");
    let kms = Arc::new(start(&socket).unwrap());
    assert!(kms.ready().is_err(), "there is no plugin");
    plugin(&socket);
    make_due(&kms);
    let slow = kms.shared.renewing.lock().await;
    kms.shared.checks().begin_if_due();
    kms.call(Call::Check(Some(mpsc::channel().0))).unwrap();
    let writes: Vec<_> = (0..MAX_WAITING)
        .map(|_| {
            let kms = kms.clone();
            tokio::spawn(async move { kms.ready().and_then(|()| kms.seal(b"value", b"name")) })
        })
        .collect();
    let are_waiting = || kms.shared.checks().callers.len() == MAX_WAITING;
    coracle_testing::until("the writes wait", 10, are_waiting).await;
    assert!(kms.ready().is_err(), "all places are taken");
    let other = start(&socket).unwrap().seal(b"value", b"name").unwrap();
    assert_eq!(kms.open(&other[kms.prefix().len()..], b"name").unwrap(), b"value", "reads have other places");
    drop(slow);
    for write in writes {
        write.await.unwrap().unwrap();
    }
    kms.health().unwrap();
}

#[test]
fn a_failed_check_is_soon_repeated() {
    let ago = |time: Duration| Instant::now().checked_sub(time).unwrap();
    let mut checks = Checks { requested: ago(RETRY_INTERVAL * 2), is_running: false, ..Checks::running() };
    assert!(!checks.begin_if_due());
    checks.record(&Err("down".to_owned()));
    assert!(checks.begin_if_due());
    checks.requested = ago(CHECK_INTERVAL * 2);
    assert!(!checks.begin_if_due(), "a check runs");
    checks.record(&Ok(()));
    assert!(checks.begin_if_due());
    checks.record(&Ok(()));
    assert!(!checks.begin_if_due(), "the last check is new");
}

#[test]
fn due_checks_do_not_wait_for_a_slow_one() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kms.sock");
    let behaviour = plugin(&socket);
    let sealed = start(&socket).unwrap().seal(b"value", b"name").unwrap();
    let kms = start(&socket).unwrap();
    let before = behaviour.lock().unwrap().statuses;
    let slow = kms.shared.renewing.blocking_lock();
    (0..5).for_each(|_| kms.call(Call::Check(None)).unwrap());
    // The thread handles messages in their order. So the checks have begun when the plugin has decrypted the other
    // seed.
    assert_eq!(kms.open(&sealed[kms.prefix().len()..], b"name").unwrap(), b"value");
    drop(slow);
    let (done, checked) = mpsc::channel();
    kms.call(Call::Check(Some(done))).unwrap();
    checked.recv().unwrap().unwrap();
    assert_eq!(behaviour.lock().unwrap().statuses, before + 1);
}

#[test]
fn garbage_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kms.sock");
    plugin(&socket);
    let kms = start(&socket).unwrap();
    let sealed = kms.seal(b"value", b"name").unwrap();
    for cut in kms.prefix().len()..sealed.len() {
        assert!(kms.open(&sealed[kms.prefix().len()..cut], b"name").is_err(), "{cut}");
    }
}

#[test]
fn a_wrong_response_of_a_plugin_is_not_kept() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kms.sock");
    let behaviour = plugin(&socket);
    let sealed = start(&socket).unwrap().seal(b"value", b"name").unwrap();
    // This client has a new seed, so the plugin must decrypt the seed of the value.
    let kms = start(&socket).unwrap();
    let own = kms.seal(b"own", b"name").unwrap();
    assert!(kms.has_key_of(&own) && !kms.has_key_of(&sealed));
    behaviour.lock().unwrap().is_wrong = true;
    let open = |context: &[u8]| kms.open(&sealed[kms.prefix().len()..], context);
    assert!(matches!(open(b"name"), Err(Error::Damaged { .. })));
    assert!(!kms.has_key_of(&sealed));
    behaviour.lock().unwrap().is_wrong = false;
    assert_eq!(open(b"name").unwrap(), b"value");
    // A damaged value does not remove a key that has decrypted another value.
    assert!(open(b"other").is_err() && kms.has_key_of(&sealed));
    assert_eq!(behaviour.lock().unwrap().decrypts, 2);
    assert!(!kms.has_key_of(b"{}") && !kms.has_key_of(b"k8s:enc:kms:v2:other:"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_plugin_that_does_not_respond_blocks_no_worker_and_gets_one_request() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kms.sock");
    let behaviour = plugin(&socket);
    let sealed = start(&socket).unwrap().seal(b"value", b"name").unwrap();
    // This client has a new seed, so the plugin must decrypt the seed of the value.
    let kms = Arc::new(start(&socket).unwrap());
    behaviour.lock().unwrap().hangs.send_replace(true);
    let opening: Vec<_> = (0..4)
        .map(|_| {
            let (kms, sealed) = (kms.clone(), sealed.clone());
            tokio::spawn(async move { kms.open(&sealed[kms.prefix().len()..], b"name").unwrap() })
        })
        .collect();
    coracle_testing::until("the plugin is called", 10, || behaviour.lock().unwrap().waiting > 0).await;
    // The runtime has one worker, and all of these tasks need it.
    tokio::spawn(async {}).await.unwrap();
    let own = kms.seal(b"own", b"name").unwrap();
    assert_eq!(kms.open(&own[kms.prefix().len()..], b"name").unwrap(), b"own");
    let (done, checked) = mpsc::channel();
    kms.call(Call::Check(Some(done))).unwrap();
    checked.recv().unwrap().unwrap();
    assert!(opening.iter().all(|one| !one.is_finished()));
    behaviour.lock().unwrap().hangs.send_replace(false);
    for one in opening {
        assert_eq!(one.await.unwrap(), b"value");
    }
    assert_eq!(behaviour.lock().unwrap().decrypts, 1);
}

#[test]
fn the_number_of_callers_that_wait_is_limited() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kms.sock");
    plugin(&socket);
    let sealed = start(&socket).unwrap().seal(b"value", b"name").unwrap();
    let kms = start(&socket).unwrap();
    let sealed = &sealed[kms.prefix().len()..];
    let all = kms.waiting.try_acquire_many(u32::try_from(MAX_WAITING).unwrap()).unwrap();
    assert!(kms.open(sealed, b"name").unwrap_err().to_string().contains("requests wait"));
    drop(all);
    assert_eq!(kms.open(sealed, b"name").unwrap(), b"value");
}
