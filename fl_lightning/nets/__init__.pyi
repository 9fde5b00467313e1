from .adapters import Frozen as Frozen
from .adapters import LoRA as LoRA
from .bisenet import BiSeNetV2 as BiSeNetV2
from .cnn import FLSAMCNN as FLSAMCNN
from .cnn import LEAFCNN as LEAFCNN
from .cnn import DigitsCNN as DigitsCNN
from .cnn import DigitsMLP as DigitsMLP
from .cnn import FashionCNN as FashionCNN
from .cnn import FullyConnected as FullyConnected
from .cnn import HsuCNN as HsuCNN
from .huggingface import HuggingFaceNet as HuggingFaceNet
from .resnet import MobileNetV2GN as MobileNetV2GN
from .resnet import PreActResNet18GN as PreActResNet18GN
from .resnet import ResNet8GN as ResNet8GN
from .resnet import ResNet18GN as ResNet18GN
from .resnet import ResNet18NoNorm as ResNet18NoNorm
from .text import LEAFLSTM as LEAFLSTM
from .text import FastText as FastText
from .text import TextTransformer as TextTransformer
from .vit import ViTCIFAR as ViTCIFAR

__all__: list[str]
