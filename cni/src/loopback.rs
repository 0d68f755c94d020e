//! The `loopback` plugin: sets a sandbox's loopback interface up, and down in DEL.

use serde::Deserialize;

use crate::error::Error;
use crate::link::Links;
use crate::netns::Netns;
use crate::spec::Command;
use crate::spec::request::Request;
use crate::spec::result::{Answer, Interface, Ip};

const LO: &str = "lo";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Conf {}

/// Runs the request. ADD returns the previous result if there is one, else the loopback interface and its addresses.
pub(crate) async fn run(request: &Request) -> Result<Option<Answer>, Error> {
    let Conf {} = request.own()?;
    match request.command {
        Command::Add => add(request).await.map(Some),
        Command::Del => {
            // If the namespace is gone, so is its loopback interface.
            if let Some(netns) = request.netns.as_deref().and_then(|path| Netns::open(path).ok()) {
                let links = Links::inside(&netns)?;
                links.down(&links.get(LO).await?).await?;
                coracle_fault::point("loopback.down");
            }
            Ok(None)
        }
        Command::Check => {
            let links = Links::inside(&Netns::open(request.netns()?)?)?;
            match links.get(LO).await?.up {
                true => Ok(None),
                false => Err(Error::Changed { what: LO.to_owned(), reason: "it is down".to_owned() }),
            }
        }
        Command::Status | Command::Gc | Command::Version => Ok(None),
    }
}

async fn add(request: &Request) -> Result<Answer, Error> {
    let path = request.netns()?;
    let links = Links::inside(&Netns::open(path)?)?;
    let lo = links.get(LO).await?;
    links.up(&lo).await?;
    coracle_fault::point("loopback.up");
    if let Some(previous) = request.previous()? {
        return Ok(previous);
    }
    let addresses = links.addresses(&lo).await?;
    let interface = Interface {
        name: LO.to_owned(),
        mac: "00:00:00:00:00:00".to_owned(),
        sandbox: path.to_string_lossy().into_owned(),
        ..Interface::default()
    };
    let ips = addresses.iter().map(|a| Ip { interface: Some(0), address: a.network, gateway: None });
    Ok(Answer { interfaces: vec![interface], ips: ips.collect(), ..Answer::default() })
}
