use serde_json::json;

use super::*;
use crate::testing::{Behaviour, FakeSigner};

/// A public key of 2,048 bits, and its signature of `header.claims`, made by openssl.
const RSA: &str = "30820122300d06092a864886f70d01010105000382010f003082010a0282010100ad36a729de461236c24aa5322326ee1bb7263dff242d363e3d89b0ab2da5e10400dbff0867012919d8f7ab642c3b95575131af11a38770e9524560140c443e1a8c8389e4be1e2a9c5420ba5d72e2098c95f1633ff6063ceebc11de7b93cd17025ee752a12e2aa5b40b7494375e511ae7aa39c45da8964ffe5eca57f552a10d7678033e123d708b2787b2a3714a3744d593e683eba12b5b19e62d496c71b4a814ce3ecc13e0ace932fd00a0abd8ec3eba1804c93daa0e6442ec4d5339be49f4b321031dddac5608cfd8430d8c91f7dc7971d7631186a2dae3620400041c4686721dfbb7408eec9892a2bd8d6648fa07667b43e4440c769d38518d0ac88a98c2910203010001";
const RSA_SIGNATURE: &str = "a8f6069e80d2e90e7678f3a0c01e3b800386f95f99895da441b9d13c87007a26a4d2478c5609e9bbb7f1f2f7ec01d7926aaa4e8a777c234ef44af89ae04cc8899408e534fdd8e1bb27f228f6edc58942e1fc3a2917619cb60a138995502f04afabbb82bbf8cbf391971c4cf006856a46c560d5d25e2794ec6be888796cc5ea51eed8c5c78f70dbeaa2e82b363d6845dc71515662ad7903e091f2aa4b4cbd99240ebca1c488714bc3811c32cbbe71397c21c4e94c339fa1f67c7240ca53e924c53b0102e1c57e1b95afee7a542902afd1c5ab78a5247647f7a2c0a7b179006ea3c7818fa65d47ebce2b21d3527a3b59e507e96e7c6a994d67bfb5a181cf53b997";
/// A key of a kind that is not supported, made by openssl.
const P224: &str = "304e301006072a8648ce3d020106052b81040021033a0004fefd115e3f2c5a60a5d5952777a5c185d0427eaaa84e6211b4bf2b062a4eb5aaa6d0c63cfbd655a24dc36dc70f15197433883145b580d8ec";
/// Public keys on P-384 and P-521, made by openssl.
const P384: &str = "3076301006072a8648ce3d020106052b8104002203620004d465bc2c4b6e3be1742f6372a23b84a1fd296066390139d158bac8c31b50df721826ba4e53c184893e77350c5eb4ed546470d520021c68666c48f8efe223954ce9646a0179144a64f57153a9145fa11e1692a33a5a8b595b3b130c83ebb309c7";
const P521: &str = "30819b301006072a8648ce3d020106052b81040023038186000400cc0314da3f99d17e16c027acc4cd38b6d7e813f66e32c257a02aa7b9a416fba8499f822659eace6d095b6534a95d0ef09ac6f256ddc93b9ae457480e6d7935d2b10080edeaa610008746b2103350d26c8695fee5bb8454ff99f84dede75b527e4696854cc64202e07eb168363dee1b3f4a13299207e6e7e6ce2b2ef1781f9b3c41968f";
/// The signature of `header.claims` by the key on P-521.
const P521_SIGNATURE: &str = "002b62d5d1621054d3f7b23cddaf09f1a46fc9b48bb3a91b3a969b6eadf96221b7febdd09308617d72003f5d51400ffeecfcc659ff4f2be8f9df4c4dd0b475e094c701ce0be1fa00d0ec41b73aab87fb5263d8e9f16c71e7075b75c84c2f7489065acfe35fcc740ef846a174c933d3b0e9451b3bdc7b041a2d1a707f12a6d8c36a0cd313";

/// A signer with this behaviour, and the result of a connection to it.
async fn connected(
    change: impl FnOnce(&mut Behaviour),
) -> (Result<Arc<TokenSigner>, Error>, Arc<std::sync::Mutex<Behaviour>>, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("signer.sock").display().to_string();
    let behaviour = FakeSigner::serve(&path);
    change(&mut behaviour.lock().unwrap());
    (TokenSigner::connect(&path, CancellationToken::new()).await, behaviour, directory)
}

fn reason<T>(outcome: Result<T, Error>) -> String {
    outcome.err().map(|error| error.to_string()).unwrap_or_default()
}

#[tokio::test]
async fn a_signed_token_is_verified_by_the_published_key() {
    let (signer, behaviour, _directory) = connected(|_| {}).await;
    let signer = signer.unwrap();
    assert_eq!(signer.max_seconds(), 7200);
    let claims = json!({"sub": "ann", "aud": ["api"]});
    let token = signer.sign(&claims).await.unwrap();
    assert_eq!(signer.verify(&token), Some(claims));
    let (signed, signature) = token.rsplit_once('.').unwrap();
    for changed in [format!("{signed}x.{signature}"), format!("{signed}."), String::new(), "a.b.c".to_owned()]
    {
        assert_eq!(signer.verify(&changed), None, "{changed}");
    }
    assert_eq!(signer.key_set()["keys"][0]["kid"], "a");
    assert_eq!(signer.algorithms(), ["ES256"]);
    assert_eq!(behaviour.lock().unwrap().fetches, 1);
}

#[tokio::test]
async fn an_address_in_the_abstract_namespace_begins_with_an_at_sign() {
    let name = format!("@coracle-token-signer-{}", std::process::id());
    let _behaviour = FakeSigner::serve(&name);
    assert!(TokenSigner::connect(&name, CancellationToken::new()).await.is_ok());
}

#[tokio::test]
async fn a_new_signing_key_is_fetched_and_an_excluded_key_verifies_only() {
    let (signer, behaviour, _directory) = connected(|_| {}).await;
    let signer = signer.unwrap();
    let old = signer.sign(&json!({})).await.unwrap();
    {
        let mut behaviour = behaviour.lock().unwrap();
        behaviour.key_id = "b".to_owned();
        behaviour.published = vec![("a".to_owned(), true), ("b".to_owned(), false)];
    }
    let new = signer.sign(&json!({})).await.unwrap();
    assert!(signer.verify(&new).is_some() && signer.verify(&old).is_some());
    let ids: Vec<_> =
        signer.key_set()["keys"].as_array().unwrap().iter().map(|key| key["kid"].clone()).collect();
    assert_eq!(ids, ["b"]);
    behaviour.lock().unwrap().key_id = "a".to_owned();
    assert!(reason(signer.sign(&json!({})).await).contains("excluded from OIDC discovery"));
    // The next fetch removes a key that the signer no longer has.
    behaviour.lock().unwrap().published = vec![("c".to_owned(), false)];
    behaviour.lock().unwrap().key_id = "c".to_owned();
    signer.sign(&json!({})).await.unwrap();
    assert!(signer.verify(&new).is_none());
}

#[tokio::test]
async fn tokens_with_unknown_keys_cause_one_fetch_at_a_time() {
    let (signer, behaviour, _directory) = connected(|_| {}).await;
    let signer = signer.unwrap();
    let token = |id: &str| {
        let header = json!({"alg": "ES256", "kid": id, "typ": "JWT"}).to_string();
        format!("{}.e30.AA", BASE64_URL_SAFE_NO_PAD.encode(header))
    };
    assert!(!signer.is_unknown(&token("a")) && !signer.is_unknown("no token"));
    assert!(signer.is_unknown(&token("b")));
    behaviour.lock().unwrap().published.push(("b".to_owned(), false));
    signer.fetch_unknown(&token("b")).await;
    assert!(!signer.is_unknown(&token("b")));
    for number in 0..100 {
        signer.fetch_unknown(&token(&number.to_string())).await;
    }
    let fetches = behaviour.lock().unwrap().fetches;
    assert!(fetches < 50, "{fetches} fetches");
}

#[tokio::test]
async fn keys_are_fetched_again_at_the_signers_interval() {
    let (signer, behaviour, _directory) = connected(|behaviour| behaviour.refresh = 1).await;
    let signer = signer.unwrap();
    behaviour.lock().unwrap().published = vec![("b".to_owned(), false)];
    let has_new_key = || signer.key_set()["keys"][0]["kid"] == "b";
    coracle_testing::until("the new key is fetched", 10, has_new_key).await;
}

#[tokio::test]
async fn invalid_tokens_of_the_signer_are_refused() {
    let (signer, behaviour, _directory) = connected(|_| {}).await;
    let signer = signer.unwrap();
    let header = |alg: &str, kid: &str, typ: &str| json!({"alg": alg, "kid": kid, "typ": typ});
    let long = "k".repeat(keys::MAX_ID + 1);
    for (sent, expect) in [
        (json!({"alg": "ES256", "kid": "a", "typ": "JWT", "crit": []}), "must have exactly"),
        (header("ES256", "a", "at+jwt"), "must have exactly"),
        (header("ES256", "", "JWT"), "must have exactly"),
        (header("ES256", &long, "JWT"), "must have exactly"),
        (header("none", "a", "JWT"), "is for ES256"),
        (header("RS256", "a", "JWT"), "is for ES256"),
        (header("ES256", "unknown", "JWT"), "does not return the key"),
    ] {
        behaviour.lock().unwrap().header = sent.clone();
        let reason = reason(signer.sign(&json!({})).await);
        assert!(reason.contains(expect), "{sent}: {reason}");
    }
    behaviour.lock().unwrap().header = Value::Null;
    behaviour.lock().unwrap().is_forging = true;
    assert!(reason(signer.sign(&json!({})).await).contains("the signature is wrong"));
}

#[tokio::test]
async fn invalid_keys_and_metadata_prevent_the_start() {
    type Change = fn(&mut Behaviour);
    let start = async |change: Change| reason(connected(change).await.0);
    let cases: [(Change, &str); 7] = [
        (|it| it.max_seconds = 599, "less than 600"),
        (|it| it.refresh = 0, "refresh_hint_seconds is 0"),
        (|it| it.published.clear(), "no keys of a supported kind"),
        (|it| it.published[0].0.clear(), "has 0 bytes"),
        (|it| it.published = (0..101).map(|id| (id.to_string(), false)).collect(), "101 keys"),
        (|it| it.others = vec![("x".to_owned(), vec![1, 2])], "not a SubjectPublicKeyInfo"),
        (|it| it.published[0].0 = "k".repeat(1025), "has 1025 bytes"),
    ];
    for (change, expect) in cases {
        let reason = start(change).await;
        assert!(reason.contains(expect), "{reason}: {expect}");
    }
}

#[tokio::test]
async fn a_signer_that_does_not_answer_is_an_error() {
    let (signer, behaviour, _directory) = connected(|it| it.hangs = true).await;
    let signer = signer.unwrap();
    // The clock advances while all tasks wait.
    tokio::time::pause();
    assert!(reason(signer.sign(&json!({})).await).contains("no response within 10s"));
    behaviour.lock().unwrap().hangs = false;
    tokio::time::resume();
    assert!(signer.sign(&json!({})).await.is_ok());
    let missing = TokenSigner::connect_within(Duration::ZERO, "/nonexistent/signer.sock").await;
    assert!(reason(missing).starts_with("cannot call Metadata of the token signer /nonexistent/signer.sock"));
}

#[tokio::test]
async fn keys_of_other_kinds_are_published_or_skipped() {
    let keys = [("rsa", RSA), ("p384", P384), ("p521", P521), ("p224", P224)];
    let others = keys.map(|(id, key)| (id.to_owned(), hex::decode(key).unwrap())).to_vec();
    let (signer, _behaviour, _directory) = connected(|it| it.others = others).await;
    let signer = signer.unwrap();
    let set = signer.key_set();
    let shown: Vec<_> =
        set["keys"].as_array().unwrap().iter().map(|key| [&key["kid"], &key["kty"], &key["alg"]]).collect();
    assert_eq!(
        shown,
        [["a", "EC", "ES256"], ["rsa", "RSA", "RS256"], ["p384", "EC", "ES384"], ["p521", "EC", "ES512"]]
    );
    assert_eq!(signer.algorithms(), ["ES256", "ES384", "ES512", "RS256"]);
    assert_eq!(set["keys"][3]["crv"], "P-521");
    let modulus = BASE64_URL_SAFE_NO_PAD.decode(set["keys"][1]["n"].as_str().unwrap()).unwrap();
    assert_eq!((modulus.len(), set["keys"][1]["e"].as_str()), (256, Some("AQAB")));
    let (signature, keys) = (hex::decode(RSA_SIGNATURE).unwrap(), signer.keys.load());
    let rsa = keys.find("rsa").unwrap();
    assert!(rsa.verify(b"header.claims", &signature).is_some());
    assert!(rsa.verify(b"header.other", &signature).is_none());
    let (signature, p521) = (hex::decode(P521_SIGNATURE).unwrap(), keys.find("p521").unwrap());
    assert!(p521.verify(b"header.claims", &signature).is_some());
    assert!(p521.verify(b"header.other", &signature).is_none());
    assert!(p521.verify(b"header.claims", &signature[1..]).is_none());
}
