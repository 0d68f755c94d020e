//! `coracle token`: bootstrap tokens for machines that join.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use coracle_agent::join::{CaHash, Token};
use coracle_watch::watch_object;
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client};
use rand::RngExt;
use serde::Serialize;
use serde_json::json;

use super::output::{self, Format, ObjectFormat};
use crate::settings::{AllFlags, Flags, LogSettings, PathSettings, Settings};

const NAMESPACE: &str = "kube-system";
const TYPE: &str = "bootstrap.kubernetes.io/token";
/// The group whose members may request a node's certificate, as in kubeadm.
const GROUP: &str = "system:bootstrappers:kubeadm:default-node-token";
/// Key in the Secret of a token with which only one machine can join. Tokens of kubeadm do not have it.
const SINGLE_NODE: &str = "usage-single-node";
/// Key with the name of the node that has joined. The control plane writes it.
const USED_BY: &str = "used-by-node";
const LETTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyz0123456789";
/// Maximum wait for the signature of cluster-info by the controller. The signature normally takes milliseconds.
const SIGNATURE_TIMEOUT: Duration = Duration::from_secs(60);

/// Flags of `coracle token`.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    paths: Flags<PathSettings>,
    /// Kubeconfig of the cluster [default: admin.kubeconfig in the state directory]
    #[arg(long, value_name = "FILE", global = true)]
    kubeconfig: Option<PathBuf>,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Create a token, and print the command that joins a machine to this cluster
    Create {
        /// Validity of the token: 90s, 30m, 24h; 0: unlimited
        #[arg(long, value_name = "TIME", default_value = "24h", value_parser = span)]
        ttl: Duration,
        /// Allow any number of machines to join with it; by default one
        #[arg(long)]
        reusable: bool,
        /// Format of the result
        #[arg(long, short, value_enum, default_value_t)]
        output: ObjectFormat,
    },
    /// List the tokens without their secrets
    List {
        /// Format of the list
        #[arg(long, short, value_enum, default_value_t)]
        output: Format,
    },
    /// Delete a token, by its id (the part before the dot) or the whole token
    Delete {
        /// Id or token, as `coracle token create` and `list` print them
        #[arg(value_name = "ID")]
        token: String,
    },
}

/// The data that a machine needs to join.
pub(super) struct Join {
    pub(super) server: String,
    pub(super) token: Token,
    pub(super) hash: CaHash,
}

/// Number of machines that may join with a token.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum UseLimit {
    Once,
    Many,
}

/// Runs one command.
pub(crate) async fn run(arguments: Arguments, log: Flags<LogSettings>) -> anyhow::Result<()> {
    let Arguments { paths, kubeconfig, verb } = arguments;
    let settings = Settings::load_for_command(AllFlags { log, paths, ..AllFlags::default() })?;
    let path = kubeconfig.unwrap_or_else(|| settings.dirs().state.join("admin.kubeconfig"));
    let client = client(&path).await?;
    match verb {
        Verb::Create { ttl, reusable, output } => {
            let joining = Joining::from(make(&client, ttl, UseLimit::of(reusable)).await?);
            super::print(&output::object(output, &joining, &joining.command)?)
        }
        Verb::List { output } => list(&client, output).await,
        Verb::Delete { token } => delete(&client, &token).await,
    }
}

/// A client with the credentials of a kubeconfig.
pub(super) async fn client(path: &Path) -> anyhow::Result<Client> {
    // If this user may not search the directory, `read_from` below reports that error.
    anyhow::ensure!(
        path.try_exists().unwrap_or(true),
        "there is no kubeconfig {}: run this command where the control plane runs, or use --kubeconfig",
        path.display()
    );
    let file = Kubeconfig::read_from(path).with_context(|| format!("cannot read {}", path.display()))?;
    let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
    let config = config.with_context(|| format!("{} has no usable cluster and user", path.display()))?;
    Client::try_from(config).context("cannot create an API client")
}

/// The result of `coracle token create`.
#[derive(Serialize)]
struct Joining {
    server: String,
    /// The token with its secret.
    token: String,
    #[serde(rename = "caHash")]
    ca_hash: String,
    /// The command that joins a machine.
    command: String,
}

impl From<Join> for Joining {
    fn from(Join { server, token, hash }: Join) -> Self {
        let (token, ca_hash) = (format!("{}.{}", token.id, token.secret), hash.to_string());
        let command = format!("coracle agent --join {server} --token {token} --ca-hash {ca_hash}");
        Self { server, token, ca_hash, command }
    }
}

/// Creates a token, and waits until `cluster-info` is signed with it.
pub(super) async fn make(client: &Client, ttl: Duration, uses: UseLimit) -> anyhow::Result<Join> {
    let token = Token { id: random_text(6), secret: random_text(16) };
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let secret = secret(&token, ttl, uses, Timestamp::now())?;
    secrets
        .create(&PostParams::default(), &secret)
        .await
        .map_err(api_message)
        .context("cannot create the token")?;
    let published = tokio::time::timeout(SIGNATURE_TIMEOUT, published(client, &token)).await;
    let PublishedCluster { server, authority } = published
        .context("timed out: the control plane has not signed kube-public/cluster-info with the token")??;
    Ok(Join { server, token, hash: CaHash::of(&authority)? })
}

impl UseLimit {
    fn of(reusable: bool) -> Self {
        if reusable { Self::Many } else { Self::Once }
    }
}

fn random_text(count: usize) -> String {
    let mut random = rand::rng();
    (0..count).map(|_| char::from(LETTERS[random.random_range(0..LETTERS.len())])).collect()
}

fn secret(token: &Token, ttl: Duration, uses: UseLimit, now: Timestamp) -> anyhow::Result<Secret> {
    let mut data = json!({
        "token-id": token.id,
        "token-secret": token.secret,
        "usage-bootstrap-authentication": "true",
        "usage-bootstrap-signing": "true",
        "auth-extra-groups": GROUP,
    });
    if uses == UseLimit::Once {
        data[SINGLE_NODE] = "true".into();
    }
    if !ttl.is_zero() {
        let end = now.checked_add(ttl).context("--ttl is too long")?;
        data["expiration"] = end.strftime("%Y-%m-%dT%H:%M:%SZ").to_string().into();
    }
    let metadata = json!({"name": format!("bootstrap-token-{}", token.id), "namespace": NAMESPACE});
    Ok(serde_json::from_value(json!({"metadata": metadata, "type": TYPE, "stringData": data}))?)
}

/// The cluster in `kube-public/cluster-info`.
struct PublishedCluster {
    /// URL of the API server.
    server: String,
    /// CA certificates in PEM.
    authority: String,
}

/// Waits until cluster-info is signed with the token.
async fn published(client: &Client, token: &Token) -> anyhow::Result<PublishedCluster> {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), "kube-public");
    let mut changes = watch_object(api, "cluster-info");
    while let Some(change) = changes.next().await {
        let Some(info) = change.context("cannot read kube-public/cluster-info")? else { continue };
        let data = info.data.unwrap_or_default();
        if !data.contains_key(&format!("jws-kubeconfig-{}", token.id)) {
            continue;
        }
        let text = data.get("kubeconfig").context("kube-public/cluster-info contains no kubeconfig")?;
        let parsed =
            Kubeconfig::from_yaml(text).context("kube-public/cluster-info has an invalid kubeconfig")?;
        let cluster = parsed
            .clusters
            .into_iter()
            .find_map(|named| named.cluster)
            .context("kube-public/cluster-info names no cluster")?;
        let authority = cluster
            .certificate_authority_data
            .context("kube-public/cluster-info names no certificate authority")?;
        let authority = base64::Engine::decode(&base64::prelude::BASE64_STANDARD, authority)?;
        return Ok(PublishedCluster {
            server: cluster.server.context("kube-public/cluster-info names no server")?,
            authority: String::from_utf8(authority)?,
        });
    }
    anyhow::bail!("the watch on kube-public/cluster-info ended")
}

async fn list(client: &Client, format: Format) -> anyhow::Result<()> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let params = ListParams::default().fields(&format!("type={TYPE}"));
    let found = secrets.list(&params).await.map_err(api_message).context("cannot list the tokens")?;
    let now = Timestamp::now();
    let rows: Vec<Row> = found.items.iter().map(|secret| row(secret, now)).collect();
    output::print(format, &rows, ["ID", "LEFT", "EXPIRES", "USAGES", "MACHINES"], |row| {
        let Row { id, left, expires, usages, machines, .. } = row;
        let expires = expires.clone().unwrap_or_else(|| "never".to_owned());
        vec![vec![id.clone(), left.clone(), expires, usages.join(","), machines.clone()]]
    })
}

/// A token without its secret.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Row {
    id: String,
    /// Expiry. `None` if the token does not expire.
    expires: Option<String>,
    usages: Vec<&'static str>,
    reusable: bool,
    /// The node that has used the token.
    #[serde(rename = "usedBy")]
    used_by: Option<String>,
    #[serde(skip)]
    left: String,
    #[serde(skip)]
    machines: String,
}

fn row(secret: &Secret, now: Timestamp) -> Row {
    let data = secret.data.clone().unwrap_or_default();
    let text = |key: &str| data.get(key).map(|bytes| String::from_utf8_lossy(&bytes.0).into_owned());
    let expires = text("expiration");
    let left = match expires.as_deref().unwrap_or_default().parse::<Timestamp>() {
        Ok(end) if end > now => left(end.duration_since(now).as_secs()),
        Ok(_) => "over".to_owned(),
        Err(_never) => "forever".to_owned(),
    };
    let is_set = |usage: &&str| text(&format!("usage-bootstrap-{usage}")).is_some_and(|used| used == "true");
    let usages = ["authentication", "signing"].into_iter().filter(is_set).collect();
    let reusable = text(SINGLE_NODE).as_deref() != Some("true");
    let used_by = text(USED_BY).filter(|_| !reusable);
    let machines = match &used_by {
        Some(node) => format!("used by {node}"),
        None if reusable => "any".to_owned(),
        None => "one".to_owned(),
    };
    Row { id: text("token-id").unwrap_or_default(), expires, usages, reusable, used_by, left, machines }
}

fn left(seconds: i64) -> String {
    match seconds {
        ..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86400),
    }
}

/// The message of an API error. The client's own text would show the whole response.
fn api_message(error: kube::Error) -> anyhow::Error {
    match error {
        kube::Error::Api(status) => anyhow::Error::msg(status.message),
        other => other.into(),
    }
}

/// Deletes the token with this id.
pub(super) async fn remove(client: &Client, id: &str) -> anyhow::Result<()> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    match secrets.delete(&format!("bootstrap-token-{id}"), &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => anyhow::bail!("there is no token {id}"),
        deleted => {
            deleted.map_err(api_message).with_context(|| format!("cannot delete the token {id}")).map(drop)
        }
    }
}

async fn delete(client: &Client, token: &str) -> anyhow::Result<()> {
    let id = token.split('.').next().unwrap_or_default();
    remove(client, id).await?;
    super::print(&format!("token {id} removed\n"))
}

/// Parses `90s`, `30m`, `1h30m`, `24h`; `0` means unlimited.
fn span(text: &str) -> Result<Duration, String> {
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let read = text.parse::<jiff::SignedDuration>().ok().and_then(|span| Duration::try_from(span).ok());
    let read = read.filter(|span| !span.is_zero());
    read.ok_or_else(|| format!("{text:?} is not a time such as 90s, 30m, 24h or 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_number_with_a_unit() {
        for (text, seconds) in [("0", 0), ("90s", 90), ("30m", 1800), ("24h", 86400), ("1h30m", 5400)] {
            assert_eq!(span(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for wrong in ["", "h", "24", "-1h", "0h", "soon"] {
            assert!(span(wrong).is_err(), "{wrong}");
        }
    }

    #[tokio::test]
    async fn a_missing_kubeconfig_and_an_unreadable_one_are_different_errors() {
        let error = async |path: &str| client(Path::new(path)).await.map(drop).unwrap_err().to_string();
        assert!(error("/nonexistent/a").await.starts_with("there is no kubeconfig /nonexistent/a: "));
        assert_eq!(error("/dev/null/a").await, "cannot read /dev/null/a");
    }

    #[test]
    fn a_token_is_a_secret_that_expires() {
        let token = Token { id: random_text(6), secret: random_text(16) };
        let now = "2026-01-01T00:00:00Z".parse().unwrap();
        let made = secret(&token, Duration::from_secs(3600), UseLimit::Once, now).unwrap();
        let data = made.string_data.unwrap();
        assert_eq!(
            (data["expiration"].as_str(), data[SINGLE_NODE].as_str()),
            ("2026-01-01T01:00:00Z", "true")
        );
        let endless = secret(&token, Duration::ZERO, UseLimit::Many, now).unwrap().string_data.unwrap();
        assert_eq!(made.metadata.name, Some(format!("bootstrap-token-{}", token.id)));
        assert!(!endless.contains_key("expiration") && !endless.contains_key(SINGLE_NODE));
        assert!(format!("{}.{}", token.id, token.secret).parse::<Token>().is_ok());
    }

    #[test]
    fn a_new_token_is_a_command_or_an_object() {
        let hash = format!("sha256:{}", "0a".repeat(32));
        let joining = || {
            let token = "abcdef.0123456789abcdef".parse::<Token>().unwrap();
            let server = "https://10.0.0.1:6443".to_owned();
            Joining::from(Join { server, token, hash: hash.parse::<CaHash>().unwrap() })
        };
        let shown = |format| output::object(format, &joining(), &joining().command).unwrap();
        let command = format!(
            "coracle agent --join https://10.0.0.1:6443 --token abcdef.0123456789abcdef --ca-hash {hash}"
        );
        assert_eq!(shown(ObjectFormat::Text), format!("{command}\n"));
        let object = json!({"server": "https://10.0.0.1:6443", "token": "abcdef.0123456789abcdef", "caHash": hash,
            "command": command});
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown(ObjectFormat::Json)).unwrap(), object);
        assert_eq!(serde_yaml_ng::from_str::<serde_json::Value>(&shown(ObjectFormat::Yaml)).unwrap(), object);
    }

    #[test]
    fn a_row_shows_no_secret() {
        let mut secret: Secret = serde_json::from_value(json!({"metadata": {}, "data": {
            "token-id": "YWJjZGVm", "token-secret": "c2VjcmV0", "usage-bootstrap-signing": "dHJ1ZQ==",
            "expiration": "MjAyNi0wMS0wMVQwMTowMDowMFo="}}))
        .unwrap();
        let shown = |secret: &Secret| row(secret, "2026-01-01T00:30:00Z".parse().unwrap());
        let first = shown(&secret);
        assert_eq!((first.left.as_str(), first.machines.as_str()), ("30m", "any"));
        assert_eq!(
            serde_json::to_value(&first).unwrap(),
            json!({"id": "abcdef", "expires": "2026-01-01T01:00:00Z", "usages": ["signing"], "reusable": true,
                   "usedBy": null})
        );
        let mut put = |key: &str, text: &str| {
            let bytes = k8s_openapi::ByteString(text.as_bytes().to_vec());
            secret.data.get_or_insert_default().insert(key.to_owned(), bytes);
            shown(&secret).machines
        };
        assert_eq!(put(SINGLE_NODE, "true"), "one");
        assert_eq!(put(USED_BY, "node-1"), "used by node-1");
    }
}
