from .bisenet import BiSeNetV2 as BiSeNetV2
from .convolutional import FLSAMCNN as FLSAMCNN
from .convolutional import LEAFCNN as LEAFCNN
from .convolutional import DigitsCNN as DigitsCNN
from .convolutional import DigitsMLP as DigitsMLP
from .convolutional import FashionCNN as FashionCNN
from .convolutional import FullyConnected as FullyConnected
from .convolutional import HsuCNN as HsuCNN
from .convolutional import MobileNetV2GN as MobileNetV2GN
from .convolutional import PreActResNet18GN as PreActResNet18GN
from .convolutional import ResNet8GN as ResNet8GN
from .convolutional import ResNet18GN as ResNet18GN
from .convolutional import ResNet18NoNorm as ResNet18NoNorm
from .pretrained import Frozen as Frozen
from .pretrained import HuggingFaceNet as HuggingFaceNet
from .pretrained import LoRA as LoRA
from .sequences import LEAFLSTM as LEAFLSTM
from .sequences import FastText as FastText
from .sequences import TextTransformer as TextTransformer
from .sequences import ViTCIFAR as ViTCIFAR

__all__: list[str]
