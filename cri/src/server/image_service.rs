//! ImageService of CRI v1 over [`Runtime`]: one line a call; each call has a file of its own.

use coracle_proto::cri;
use coracle_proto::cri::image_service_server::ImageService;
use tonic::Request;

use super::later::later;
use super::status::{Answer, Streamed, answer};
use crate::runtime::Runtime;

#[tonic::async_trait]
impl ImageService for Runtime {
    async fn list_images(
        &self,
        _request: Request<cri::ListImagesRequest>,
    ) -> Answer<cri::ListImagesResponse> {
        answer(Err(later("ListImages")))
    }

    type StreamImagesStream = Streamed<cri::StreamImagesResponse>;
    async fn stream_images(
        &self,
        _request: Request<cri::StreamImagesRequest>,
    ) -> Answer<Self::StreamImagesStream> {
        answer(Err(later("StreamImages")))
    }

    async fn image_status(
        &self,
        _request: Request<cri::ImageStatusRequest>,
    ) -> Answer<cri::ImageStatusResponse> {
        answer(Err(later("ImageStatus")))
    }

    async fn pull_image(&self, _request: Request<cri::PullImageRequest>) -> Answer<cri::PullImageResponse> {
        answer(Err(later("PullImage")))
    }

    async fn remove_image(
        &self,
        _request: Request<cri::RemoveImageRequest>,
    ) -> Answer<cri::RemoveImageResponse> {
        answer(Err(later("RemoveImage")))
    }

    async fn image_fs_info(
        &self,
        _request: Request<cri::ImageFsInfoRequest>,
    ) -> Answer<cri::ImageFsInfoResponse> {
        answer(Err(later("ImageFsInfo")))
    }
}
